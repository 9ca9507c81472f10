"""Reconciles the known dispatches of peer routers with the load reports of replicas.

Pure. Own dispatches are exact: a replica's stream carries their starts and ends in order, and before each report.
Dispatches of peer routers come over Redis and may be lost. A report bounds how many of them can be at the replica.
"""

from __future__ import annotations

from typing import Final

from services.router.placement.backlog import Backlog, Work
from services.router.placement.policy import LoadReported

SETTLED_S: Final = 0.25
"""A younger dispatch may not have reached the replica when it reported."""

REFUTED_LIFE_S: Final = 0.25
"""A refuted dispatch is forgotten after this. Its finish, which reports the actual hit, may still come before."""

RECONCILE_S: Final = 0.25
"""Shortest time between two evaluated reports of a replica. A busy one reports twenty times a second."""


class Reconciliation:
    """Evaluates load reports and changes `backlog`. Refuted dispatches expire there."""

    def __init__(self, backlog: Backlog) -> None:
        self.refuted_total = 0
        """Dispatches refuted by reports."""
        self._backlog = backlog
        self._reconciled_s: dict[str, float] = {}

    def on_load(self, seen: LoadReported) -> None:
        """Evaluate a report. Prompts in the engine have started, whichever router sent them; all other prompts wait."""
        if seen.at_s - self._reconciled_s.get(seen.replica, float("-inf")) < RECONCILE_S:
            return
        self._reconciled_s[seen.replica] = seen.at_s
        works = self._backlog.of(seen.replica)
        others = [work for work in works if not work.is_own and seen.at_s - work.at_s > SETTLED_S]
        if not others:
            return
        own_started = sum(work.is_own and work.started_s is not None for work in works)
        own_waiting = sum(
            work.is_own and work.started_s is None and seen.at_s - work.at_s > SETTLED_S for work in works
        )
        running = max(0, seen.running_requests - own_started)  # an exact number, of other routers
        started = sorted((work for work in others if work.started_s is not None), key=_ends_s)
        kept = started[max(0, len(started) - running) :]
        self._refute(started[: len(started) - len(kept)], seen.at_s)
        waiting = sorted((work for work in others if work.started_s is None), key=_since_s)
        room = max(0, seen.queued_requests - own_waiting) + running - len(kept)
        excess = max(0, len(waiting) - room)
        self._refute(waiting[:excess], seen.at_s)
        # A prompt that waits here and not at the replica has started: the message was lost.
        unqueued = max(0, len(waiting) - excess + own_waiting - seen.queued_requests)
        for work in waiting[excess:][: min(unqueued, running - len(kept))]:
            self._backlog.start(work.key, seen.at_s)

    def forget(self, replica: str) -> None:
        """Forget a lost replica."""
        self._reconciled_s.pop(replica, None)

    def _refute(self, works: list[Work], now_s: float) -> None:
        for work in works:
            if work.expires_s > now_s + REFUTED_LIFE_S:
                self.refuted_total += 1
                self._backlog.expire_by(work.key, now_s + REFUTED_LIFE_S)


def _ends_s(work: Work) -> float:
    return (work.started_s or 0.0) + work.prefill_s


def _since_s(work: Work) -> float:
    return work.at_s
