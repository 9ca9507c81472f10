"""Brings what is believed of other routers' dispatches in line with what replicas report.

Pure. Own dispatches are exact: a replica's stream tells their starts and ends in order, and before each report. Those of
others are heard over Redis, or not; a report bounds how many of them can be there.
"""

from __future__ import annotations

from typing import Final

from services.router.placement.backlog import Backlog, Work
from services.router.placement.policy import LoadReported

SETTLED_S: Final = 0.25
"""A dispatch younger than this may not have reached the replica when it reported."""

REFUTED_LIFE_S: Final = 0.25
"""What a report denies is forgotten after this, unless its finish, which knows what was in cache, comes before."""

RECONCILE_S: Final = 0.25
"""A replica's reports are looked at no more often: a busy one reports twenty times a second."""


class Reconciliation:
    """Looks at load reports; changes `backlog`. What is to be forgotten expires there."""

    def __init__(self, backlog: Backlog) -> None:
        self.refuted_total = 0
        """Dispatches that reports denied."""
        self._backlog = backlog
        self._reconciled_s: dict[str, float] = {}

    def on_load(self, seen: LoadReported) -> None:
        """Take a report. Started are the prompts the engine has, of whomever; the rest of them wait."""
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
        running = max(0, seen.running_requests - own_started)  # of others, and exactly
        started = sorted((work for work in others if work.started_s is not None), key=_ends_s)
        kept = started[max(0, len(started) - running) :]
        self._refute(started[: len(started) - len(kept)], seen.at_s)
        waiting = sorted((work for work in others if work.started_s is None), key=_since_s)
        room = max(0, seen.queued_requests - own_waiting) + running - len(kept)
        excess = max(0, len(waiting) - room)
        self._refute(waiting[:excess], seen.at_s)
        # Who waits here and neither there must have started: the news of it was lost.
        unqueued = max(0, len(waiting) - excess + own_waiting - seen.queued_requests)
        for work in waiting[excess:][: min(unqueued, running - len(kept))]:
            self._backlog.start(work.key, seen.at_s)

    def forget(self, replica: str) -> None:
        """The replica is gone."""
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
