"""Seconds of work in front of a new request, per replica: what was dispatched there and has not finished.

Pure. Entries come from dispatches of this router and of others; each is removed by its finish, by the death of its router
or replica, by a load report that contradicts it, or when it expires.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvmesh.queue_order import OrderKey, shortest

UTILISATION_S: Final = 10.0
"""Time in which the memory of recent work fades to 1/e."""

Key = tuple[str, str]
"""Router and request id."""


@dataclass(slots=True)
class Work:
    """One dispatched prompt."""

    key: Key
    replica: str
    hashes: Sequence[int]
    prefill_s: float
    at_s: float
    expires_s: float
    started_s: float | None = None
    is_own: bool = False


class Backlog:
    """All dispatched work, by replica."""

    def __init__(self, own_router: str, order_key: OrderKey = shortest) -> None:
        """`order_key`: the order in which replicas start what waits."""
        self._own_router = own_router
        self._order_key = order_key
        self._work: dict[Key, Work] = {}
        self._replicas: dict[str, dict[Key, Work]] = {}
        self._recent: dict[str, tuple[float, float]] = {}
        self._next_expiry_s = math.inf

    def __len__(self) -> int:
        return len(self._work)

    def add(self, work: Work) -> Work | None:
        """Add `work`; return what it replaces."""
        old = self.remove(work.key)
        work.is_own = work.key[0] == self._own_router
        self._work[work.key] = work
        self._replicas.setdefault(work.replica, {})[work.key] = work
        self._next_expiry_s = min(self._next_expiry_s, work.expires_s)
        seconds = self.recent_s(work.replica, work.at_s) + work.prefill_s
        self._recent[work.replica] = (seconds, work.at_s)
        return old

    def start(self, key: Key, at_s: float) -> None:
        """It is in the engine now."""
        work = self._work.get(key)
        if work is not None and work.started_s is None:
            work.started_s = at_s

    def remove(self, key: Key) -> Work | None:
        """Forget it; return it if it was known."""
        work = self._work.pop(key, None)
        if work is not None:
            queue = self._replicas[work.replica]
            del queue[key]
            if not queue:
                del self._replicas[work.replica]
        return work

    def expire_by(self, key: Key, at_s: float) -> None:
        """Its time is over at `at_s` at the latest."""
        work = self._work.get(key)
        if work is not None and at_s < work.expires_s:
            work.expires_s = at_s
            self._next_expiry_s = min(self._next_expiry_s, at_s)

    def of(self, replica: str) -> list[Work]:
        """Return the work at `replica`."""
        return list(self._replicas.get(replica, {}).values())

    def by(self, router: str) -> list[Work]:
        """Return the work `router` dispatched."""
        return [work for work in self._work.values() if work.key[0] == router]

    def expired(self, now_s: float) -> list[Work]:
        """Return the work that should be removed: its time is over. Usually O(1)."""
        if now_s < self._next_expiry_s:
            return []
        self._next_expiry_s = min(
            (work.expires_s for work in self._work.values() if work.expires_s > now_s), default=math.inf
        )
        return [work for work in self._work.values() if work.expires_s <= now_s]

    def queue_s(self, replica: str, prefill_s: float, now_s: float) -> float:
        """Return the seconds until `replica` would start a prompt of `prefill_s` that arrives now.

        Running ones count what is left of them, waiting ones only if they are served before it.
        """
        total = 0.0
        own_key = self._order_key(prefill_s, now_s)
        for work in self._waiting_and_running(replica):
            if work.started_s is not None:
                total += max(0.0, work.started_s + work.prefill_s - now_s)
            elif self._order_key(work.prefill_s, work.at_s) <= own_key:
                total += work.prefill_s
        return total

    def total_s(self, replica: str, now_s: float) -> float:
        """Return the seconds of all work at `replica`, whatever its order."""
        return self.queue_s(replica, math.inf, now_s)

    def unstarted(self, replica: str) -> tuple[int, float]:
        """Return how many prompts at `replica` have not started, and their seconds."""
        count, seconds = 0, 0.0
        for work in self._waiting_and_running(replica):
            if work.started_s is None:
                count += 1
                seconds += work.prefill_s
        return count, seconds

    def recent_s(self, replica: str, now_s: float) -> float:
        """Return the seconds dispatched to `replica` lately, fading over UTILISATION_S."""
        seconds, at_s = self._recent.get(replica, (0.0, now_s))
        return seconds * math.exp(-max(0.0, now_s - at_s) / UTILISATION_S)

    def forget(self, replica: str) -> None:
        """The replica is gone; its work must have been removed."""
        self._recent.pop(replica, None)

    def _waiting_and_running(self, replica: str) -> Iterator[Work]:
        queue = self._replicas.get(replica)
        return iter(queue.values()) if queue is not None else iter(())

    def assert_consistent(self) -> None:
        """Raise AssertionError if the two views of the work differ."""
        listed = {key: work for queue in self._replicas.values() for key, work in queue.items()}
        assert listed == self._work
        assert all(self._replicas.values()), "an empty queue is kept"
        assert all(work.key == key for key, work in self._work.items())
