"""Orders of operators on regions: drain, restore, avoid. Checked before they become state. Pure.

A refusal names the field, its value and the allowed range.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

import msgspec

from controlplane.regions.declared import FULL_PERCENT, Declared, DeclaredState, next_revision
from controlplane.regions.observed import Avoid

REASON_CHARACTERS_MAX: Final = 200
"""Longest reason of an operator."""

TTL_MIN_S: Final = 10.0
TTL_MAX_S: Final = 24 * 3600.0
"""Range of the time for which a region may be avoided."""


class OrderRefused(ValueError):
    """An order is refused. The text is the sentences of `reasons`; the state did not change."""

    def __init__(self, *reasons: str) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


class Drain(msgspec.Struct, frozen=True):
    """Drain of a region."""

    region: str
    reason: str
    until_s: float = 0.0
    """Unix time; 0: open."""
    weight_percent: float = 0.0
    """Weight that stays."""


class AvoidOrder(msgspec.Struct, frozen=True):
    """Order to leave another region, or to hold it for healthy, for the own callers."""

    region: str
    ttl_s: float
    reason: str
    is_ok: bool = False
    """True: HEALTHY instead of OUT."""


def drain(order: Drain, known: Declared, regions: Collection[str], author: str, wall_s: float) -> Declared:
    """Return the state that a drain declares. Raises OrderRefused.

    A drain of a region that is drained already changes its reason and its end alone: the ramp does not begin anew, so no
    load comes back. Without an end of its own it keeps the one that is known.
    """
    faults = [*_unknown(order.region, regions), *_reason(order.reason)]
    if order.until_s and not wall_s < order.until_s < math.inf:
        faults.append(f"until: {order.until_s:.0f}, allowed: after {wall_s:.0f} (Unix time, now)")
    if not 0 <= order.weight_percent < FULL_PERCENT:
        faults.append(f"weight: {order.weight_percent:g} %, allowed: from 0 to below 100 %")
    if faults:
        raise OrderRefused(*faults)
    is_new = known.is_serving
    stays_drained = known.state.is_drained and order.weight_percent <= 0
    return Declared(
        state=DeclaredState.DRAINED if stays_drained else DeclaredState.DRAINING,
        revision=next_revision(known, wall_s),
        weight_percent=order.weight_percent,
        reason=order.reason,
        until_s=order.until_s if is_new or order.until_s else known.until_s,
        author=author,
        at_s=wall_s if is_new else known.at_s,
    )


def drained(known: Declared, wall_s: float) -> Declared:
    """Return the state after the last stream of a full drain. Raises OrderRefused in another state."""
    if known.state is not DeclaredState.DRAINING or known.weight_percent > 0:
        raise OrderRefused(f"state: {known.state.value}, allowed: DRAINING to weight 0")
    return msgspec.structs.replace(
        known, state=DeclaredState.DRAINED, revision=next_revision(known, wall_s), at_s=wall_s
    )


def restore(
    region: str, reason: str, known: Declared, regions: Collection[str], author: str, wall_s: float
) -> Declared:
    """Return the state that a restore declares. Raises OrderRefused; a region that serves has nothing to restore."""
    faults = [*_unknown(region, regions), *_reason(reason)]
    if known.is_serving:
        faults.append(f"region: {region} is SERVING, allowed: a region that is DRAINING or DRAINED")
    if faults:
        raise OrderRefused(*faults)
    return Declared(
        state=DeclaredState.SERVING,
        revision=next_revision(known, wall_s),
        reason=reason,
        author=author,
        at_s=wall_s,
    )


def avoid(order: AvoidOrder, own: str, regions: Collection[str], author: str, now_s: float) -> Avoid:
    """Return the override that an order makes at monotonic time `now_s`. Raises OrderRefused."""
    faults = [*_unknown(order.region, regions), *_reason(order.reason)]
    if order.region == own:
        others = ", ".join(sorted(set(regions) - {own}))
        faults.append(f"region: {own} is the own region, allowed: {others}; a region drains itself")
    if not TTL_MIN_S <= order.ttl_s <= TTL_MAX_S:
        faults.append(f"ttl: {order.ttl_s:g} s, allowed: {TTL_MIN_S:g} s to {TTL_MAX_S:g} s")
    if faults:
        raise OrderRefused(*faults)
    return Avoid(is_ok=order.is_ok, until_s=now_s + order.ttl_s, reason=order.reason, author=author)


def _unknown(region: str, regions: Collection[str]) -> list[str]:
    if region in regions:
        return []
    return [f'region: "{region}" is unknown, allowed: {", ".join(sorted(regions))}']


def _reason(reason: str) -> list[str]:
    if reason.strip() and len(reason) <= REASON_CHARACTERS_MAX:
        return []
    found = f"{len(reason)} characters" if reason.strip() else "empty"
    return [f"reason: {found}, allowed: 1 to {REASON_CHARACTERS_MAX} characters"]
