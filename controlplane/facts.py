"""The facts by which the state machine of a rollout decides, gathered from the core's parts. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from controlplane.rollouts.view import FrontendFacts, Nack
from controlplane.snapshots.receivers import Receiver, Receivers
from kvmesh.snapshot.published import NO_NAME, Name


def frontend_facts(receivers: Receivers, name: Name, now_s: float) -> tuple[FrontendFacts, ...]:
    """Return the facts of all leased frontends. `name`: the snapshot that they have to apply."""
    facts = []
    for process_id, since_s in sorted(receivers.frontends.items()):
        receiver = receivers.named(process_id)
        heard_s = since_s if receiver is None else max(since_s, receiver.heard_s)
        facts.append(
            FrontendFacts(
                process_id,
                silent_s=max(0.0, now_s - heard_s),
                applies=receiver is not None and name != NO_NAME and receiver.applied.order >= name.order,
                model_versions=receiver.model_versions if receiver is not None else frozenset(),
            )
        )
    return tuple(facts)


def nacks(receivers: Iterable[Receiver], first: Name, latest: Name) -> tuple[Nack, ...]:
    """Return the refusals of the published snapshots from `first` to `latest`. Other names say nothing."""
    if first == NO_NAME:
        return ()
    return tuple(
        Nack(each.process_id, each.rejection)
        for each in receivers
        if each.rejection
        and first.order <= each.rejected.order <= latest.order
        and each.applied.order < first.order
    )
