"""The replicas that may get new requests now, kept as lists until one changes or an ejected one may be probed.

Pure. A decision looks at a handful of replicas; to check each of a thousand would take longer than the decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Final

from services.router.forwarding.attempt import Attempt
from services.router.forwarding.replicas import Replica
from services.router.placement.policy import ReplicaState

STALE_S: Final = 1.25
"""A load report older than this is stale and refuses no request. A replica sends one at least each second."""


class EligibleReplicas:
    """The eligible replicas of both roles: the same lists until one changes."""

    def __init__(self, replicas: Mapping[str, Replica[Attempt]]) -> None:
        """`replicas`: by name. The caller owns the mapping, and calls `changed` after each change."""
        self._replicas = replicas
        self.change_count = 0
        """Ascends with each change of a replica or of an ejection."""
        self._is_known = False
        self._prefill: list[Replica[Attempt]] = []
        self._decode: list[Replica[Attempt]] = []
        self._states: tuple[list[ReplicaState], list[ReplicaState]] | None = None
        """The answer of `current` while nothing changes. None: to be computed again."""
        self._trusted_s = 0.0
        """Time at which `_states` was computed."""
        self._next_probe_s = 0.0
        """Time at which the next ejected replica may be probed."""
        self._oldest_s = 0.0
        """Lower bound of the times of all reports that were fresh at the last check."""

    def changed(self) -> None:
        """Note that a replica came, went, or changed its eligibility."""
        self._is_known = False
        self.change_count += 1

    def trust_changed(self) -> None:
        """Note that an ejection or a half-open probe began or ended, or that a replica's handoffs did."""
        self._states = None
        self.change_count += 1

    def current(self, now_s: float) -> tuple[Sequence[ReplicaState], Sequence[ReplicaState]]:
        """Return the prefill and the decode replicas. Reports older than STALE_S are marked as stale.

        At least half of a role is returned, ejected or not (see `trusted`). If no decode replica takes handoffs, no prefill
        replica is returned: every prompt runs on decode alone.
        """
        self._know()
        if now_s - self._oldest_s > STALE_S:
            self._mark_stale(now_s)
        if self._states is None or now_s >= self._next_probe_s:
            self._states = _pairs(trusted(self._prefill, now_s), trusted(self._decode, now_s))
            self._trusted_s = now_s
            ejections = (one.ejection.until_s for one in (*self._prefill, *self._decode))
            self._next_probe_s = min(
                (one for one in ejections if one is not None and one > now_s), default=inf
            )
        return self._states

    def can_place(self, now_s: float, *, needs_prefill: bool) -> bool:
        """Return True if a decode replica may take a request, and a prefill replica too unless `needs_prefill` is False.

        An ejected replica does not count, also where `current` returns it because the role has no other.
        """
        self._know()
        roles = (self._prefill, self._decode) if needs_prefill else (self._decode,)
        return all(any(one.ejection.may_take(now_s) for one in role) for role in roles)

    def placeable_decode_count(self, now_s: float) -> int:
        """Return the number of decode replicas that may take a request, ejected ones left out."""
        self._know()
        return sum(one.ejection.may_take(now_s) for one in self._decode)

    def _know(self) -> None:
        if self._is_known:
            return
        placeable = [one for one in self._replicas.values() if one.is_placeable()]
        self._prefill = [one for one in placeable if one.role == "prefill"]
        self._decode = [one for one in placeable if one.role == "decode"]
        self._states, self._is_known = None, True
        self._oldest_s = -inf

    def _mark_stale(self, now_s: float) -> None:
        oldest_s = now_s
        for one in (*self._prefill, *self._decode):
            state = one.load.state
            reported_s = state.reported_at_s
            state.is_stale = now_s - reported_s > STALE_S
            if reported_s < oldest_s and not state.is_stale:
                oldest_s = reported_s
        self._oldest_s = oldest_s

    def assert_consistent(self) -> None:
        """Raise AssertionError if the kept lists differ from fresh ones."""
        if not self._is_known:
            return
        placeable = [one for one in self._replicas.values() if one.is_placeable()]
        assert self._prefill == [one for one in placeable if one.role == "prefill"], "a change was missed"
        assert self._decode == [one for one in placeable if one.role == "decode"], "a change was missed"
        if self._states is not None:
            fresh = _pairs(*(trusted(role, self._trusted_s) for role in (self._prefill, self._decode)))
            for found, kept in zip(fresh, self._states, strict=True):
                assert [*map(id, kept)] == [*map(id, found)], "a change of an ejection was missed"


def _pairs(
    prefill: list[ReplicaState], decode: list[ReplicaState]
) -> tuple[list[ReplicaState], list[ReplicaState]]:
    """Return the replicas of both roles; no prefill replica if no decode replica takes handoffs."""
    return ([] if decode and all(one.is_aggregated for one in decode) else prefill), decode


def trusted(replicas: list[Replica[Attempt]], now_s: float) -> list[ReplicaState]:
    """Return the states of the replicas that may take a request, and of ejected ones up to half of `replicas`.

    If none may take a request, all are returned. Failures of most replicas at once point to the load or the network,
    and the other replicas could not carry the load alone.
    """
    trusted: list[Replica[Attempt]] = []
    ejected: list[Replica[Attempt]] = []
    for one in replicas:
        (trusted if one.ejection.may_take(now_s) else ejected).append(one)
    if not trusted:
        return [one.load.state for one in replicas]
    missing = len(replicas) - len(replicas) // 2 - len(trusted)
    if missing > 0:
        trusted += sorted(ejected, key=lambda one: one.ejection.until_s or 0.0)[:missing]
    return [one.load.state for one in trusted]
