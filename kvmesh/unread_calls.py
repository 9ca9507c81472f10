"""Calls without their first message: limits on open calls and on concurrent reads, against slowloris clients. Pure.

A call that is being read may hold a whole message in gRPC's memory. A waiting call holds no more than its flow-control
window. Callers share reads and capacity by fair queuing (`FairQueue`; docs/decisions/0022).

Overflow behaviour: a call over the capacity of its caller is refused at once. A call without a read is refused after
WAIT_S. While calls wait, the caller with the most reads loses its longest read, once that read has had READ_MIN_S.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Final

from kvmesh.errors import MeshError
from kvmesh.fair_queue import FairQueue, Path

READ_MIN_S: Final = 0.25
"""Shortest time that a read gets, however many calls wait. Most messages arrive together with their headers."""

WAIT_S: Final = 1.0
"""Longest wait for a read."""

RETRY_AFTER_S: Final = 1.0


class UnreadCall:
    """One call. `opened_s`: arrival of its headers. `reading_s`: start of the read of its message; None: it waits."""

    __slots__ = ("is_evicted", "opened_s", "reading_s")

    def __init__(self, opened_s: float) -> None:
        self.opened_s = opened_s
        self.reading_s: float | None = None
        self.is_evicted = False
        """True once the call was evicted."""


class UnreadCalls:
    """All calls of a process without their first message.

    INVARIANT: at most `readers_max` calls are read, and at most `calls_max` are open. No call waits while a reader is free.
    """

    def __init__(self, calls_max: int, readers_max: int) -> None:
        self.calls_max = calls_max
        self.readers_max = readers_max
        self.reading: dict[UnreadCall, None] = {}
        """Calls with a reader, including evicted calls that are not closed yet."""
        self.waiting: dict[UnreadCall, None] = {}
        """Calls without a reader, in order of arrival."""
        self.refused_total = 0
        self.evicted_total = 0
        self._queue: FairQueue[UnreadCall] = FairQueue()
        self._ending = 0
        """Evicted calls in `reading`. Their readers will be free soon."""

    def __len__(self) -> int:
        return len(self.reading) + len(self.waiting)

    def __repr__(self) -> str:
        return f"UnreadCalls({len(self.reading)}/{self.readers_max} reading, {len(self)}/{self.calls_max})"

    @property
    def is_empty(self) -> bool:
        """True if no state of any caller is kept."""
        return self._queue.is_empty

    def open(self, caller: Path, now_s: float) -> UnreadCall:
        """Return a new call of `caller`, which is read (`reading_s` is set) or waits.

        Raises MeshError (CALLS_FULL) if the caller holds at least as many calls as it leaves free.
        """
        excess = self._queue.excess(caller, self.calls_max - len(self))
        if excess is not None:
            self.refused_total += 1
            held, limit = excess
            what = (
                f"{len(self)} calls wait for their message, {held} of them of one caller; {limit} are allowed"
            )
            raise full(what, held, limit)
        call = UnreadCall(now_s)
        self._queue.push(caller, call)
        self.waiting[call] = None
        self._read_next(now_s)
        return call

    def close(self, call: UnreadCall, now_s: float) -> UnreadCall | None:
        """Remove `call`, and return the waiting call that gets its reader, or None. A second call is ignored."""
        self._queue.remove(call)
        self.waiting.pop(call, None)
        if call in self.reading:
            del self.reading[call]
            self._ending -= call.is_evicted
        return self._read_next(now_s)

    def evict_due(self, now_s: float) -> list[UnreadCall]:
        """Evict and return the calls that are due. The caller must still close them."""
        due = list(takewhile(lambda call: now_s >= call.opened_s + WAIT_S, self.waiting))
        for call in due:
            del self.waiting[call]
            self._evict(call)
        while (slow := self._next_to_evict()) is not None and now_s >= _since(slow) + READ_MIN_S:
            self._evict(slow)
            self._ending += 1
            due.append(slow)
        return due

    def next_due_s(self) -> float | None:
        """Return the time of the next `evict_due`. None: no call waits."""
        oldest = next(iter(self.waiting), None)
        if oldest is None:
            return None
        reader = self._next_to_evict()
        wait_ends_s = oldest.opened_s + WAIT_S
        return wait_ends_s if reader is None else min(wait_ends_s, _since(reader) + READ_MIN_S)

    def _next_to_evict(self) -> UnreadCall | None:
        """Return the next call to evict for a waiting one: the longest read of the caller with the most reads."""
        if len(self.waiting) <= self._ending:
            return None
        read = (call for call in self.reading if not call.is_evicted)
        return min(read, key=self._rank, default=None)

    def _rank(self, call: UnreadCall) -> tuple[float, ...]:
        return (*(-readers for readers in self._queue.served_beside(call)), _since(call))

    def _evict(self, call: UnreadCall) -> None:
        call.is_evicted = True
        self.evicted_total += 1
        self._queue.remove(call)

    def _read_next(self, now_s: float) -> UnreadCall | None:
        """Give a free reader to the next waiting call, and return that call, or None."""
        if len(self.reading) >= self.readers_max:
            return None
        call = self._queue.serve()
        if call is not None:
            del self.waiting[call]
            call.reading_s = now_s
            self.reading[call] = None
        return call


def full(what: str, held: int, limit: int) -> MeshError:
    """Return the refusal of a call for lack of capacity before its message is read."""
    return MeshError(
        "CALLS_FULL",
        f"the process is full: {what}",
        {"held": str(held), "limit": str(limit)},
        retry_after_s=RETRY_AFTER_S,
    )


def _since(call: UnreadCall) -> float:
    assert call.reading_s is not None, "the call is not being read"
    return call.reading_s
