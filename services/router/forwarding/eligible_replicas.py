"""Which replicas may be sent new requests now. They are gone through only when one of them changed, or may be tried again.

Pure. A decision looks at a handful of replicas; asking each of a thousand whether it is there would cost more than that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Final

from services.router.forwarding.attempt import Attempt
from services.router.forwarding.replicas import Replica
from services.router.placement.policy import ReplicaState

STALE_S: Final = 1.25
"""A report is at most this old: one comes each second. An older one does not tell how full the replica is."""


class EligibleReplicas:
    """The replicas of both roles, as views have them: the same lists until one changed."""

    def __init__(self, replicas: Mapping[str, Replica[Attempt]]) -> None:
        """`replicas`: by name, kept by the caller, who tells what is `changed`."""
        self._replicas = replicas
        self._is_known = False
        self._prefill: list[Replica[Attempt]] = []
        self._decode: list[Replica[Attempt]] = []
        self._states: tuple[list[ReplicaState], list[ReplicaState]] | None = None
        """What is to be answered as long as nothing changes; None: trust has changed."""
        self._trusted_s = 0.0
        """When that was found."""
        self._next_probe_s = 0.0
        """When the next ejected one may be tried."""
        self._oldest_s = 0.0
        """No report that was fresh when they were looked at is older."""

    def changed(self) -> None:
        """A replica came, went, or may be sent requests no more, or again."""
        self._is_known = False

    def trust_changed(self) -> None:
        """A replica was ejected or readmitted, or its trial began or ended."""
        self._states = None

    def current(self, now_s: float) -> tuple[Sequence[ReplicaState], Sequence[ReplicaState]]:
        """Return prefill and decode. The last ones of a role are not ejected. Old reports are marked as stale."""
        if not self._is_known:
            placeable = [one for one in self._replicas.values() if one.is_placeable()]
            self._prefill = [one for one in placeable if one.role == "prefill"]
            self._decode = [one for one in placeable if one.role == "decode"]
            self._states, self._is_known = None, True
            self._oldest_s = -inf
        if now_s - self._oldest_s > STALE_S:
            self._mark_stale(now_s)
        if self._states is None or now_s >= self._next_probe_s:
            self._states = trusted(self._prefill, now_s), trusted(self._decode, now_s)
            self._trusted_s = now_s
            ejections = (one.ejection.until_s for one in (*self._prefill, *self._decode))
            self._next_probe_s = min(
                (one for one in ejections if one is not None and one > now_s), default=inf
            )
        return self._states

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
        """Raise AssertionError if what is kept is not what is there."""
        if not self._is_known:
            return
        placeable = [one for one in self._replicas.values() if one.is_placeable()]
        assert self._prefill == [one for one in placeable if one.role == "prefill"], "a change was not told"
        assert self._decode == [one for one in placeable if one.role == "decode"], "a change was not told"
        if self._states is not None:
            for role, kept in zip((self._prefill, self._decode), self._states, strict=True):
                found = trusted(role, self._trusted_s)
                assert [*map(id, kept)] == [*map(id, found)], "a change of trust was not told"


def trusted(replicas: list[Replica[Attempt]], now_s: float) -> list[ReplicaState]:
    """Return those that are not ejected, and of the others so many that half of all are there; all, if none is trusted.

    Failures of most replicas at a time tell of the load, or of the network, and the rest could not carry it alone.
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
