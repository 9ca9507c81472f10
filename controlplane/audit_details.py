"""Values before and after a command, for the audit. Pure."""

from __future__ import annotations

from typing import Final

from controlplane.library import Document
from controlplane.regions.document import RegionOrders
from controlplane.rollouts.document import RolloutDocument, timestamp
from controlplane.snapshots.desired import Desired

NAMES_MAX: Final = 20
"""Cordoned processes that are named."""


def changes(before: Document | None, after: Document, overridden: tuple[str, ...]) -> dict[str, str]:
    """Return the values that differ, and the checks that `force` overrode. `before` None: the document is new."""
    old = described(before) if before is not None else {}
    new = described(after)
    changed = [name for name in new if old.get(name) != new[name]]
    details = {
        "before": ", ".join(f"{name} {old[name]}" for name in changed if name in old),
        "after": ", ".join(f"{name} {new[name]}" for name in changed),
        "overridden": "; ".join(overridden),
    }
    return {name: value for name, value in details.items() if value}


def described(document: Document) -> dict[str, str]:
    """Return the values of a document that a command changes."""
    if isinstance(document, RolloutDocument):
        return _rollout(document)
    return _desired(document)


def _rollout(document: RolloutDocument) -> dict[str, str]:
    attested = {each.requirement: "pass" if each.passed else "fail" for each in document.attestations}
    return {
        "state": document.state_name,
        "step": str(document.step),
        "weight": f"{document.weight_percent} %",
        "attested": " ".join(f"{name}={result}" for name, result in sorted(attested.items())) or "none",
    }


def _desired(desired: Desired) -> dict[str, str]:
    cordons = [f"{each.process_id} ({'drain' if each.draining else 'cordon'})" for each in desired.cordons]
    shown = " ".join(cordons[:NAMES_MAX]) + (" ..." if len(cordons) > NAMES_MAX else "")
    return {
        "cordons": shown or "none",
        "frozen until": timestamp(round(desired.frozen_until_s)).ToJsonString()
        if desired.frozen_until_s
        else "none",
        "stable pool": desired.stable_pool or "by rollout",
        "shadow": f"{desired.shadow.id} to {desired.shadow.to_pool}"
        if desired.shadow is not None
        else "none",
        "regions": _regions(desired.regions) or "none",
    }


def _regions(orders: RegionOrders) -> str:
    declared = [f"{name} {each.state.value}" for name, each in sorted(orders.declared.items())]
    avoided = [
        f"{name} by hand {'HEALTHY' if each.is_ok else 'OUT'}" for name, each in sorted(orders.avoids.items())
    ]
    return " ".join((*declared, *avoided))
