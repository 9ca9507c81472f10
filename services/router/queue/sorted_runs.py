"""A sorted list in short runs with the work of each run. A change shifts at most one run. Pure.

A bisection over the last entry of each run finds the run. The work before an entry is a sum over runs and over a part of
one. This takes some microseconds for tens of thousands of entries. A heap with lazy removal is no faster to change, and
gives neither that sum nor the order from the end. Libraries of sorted lists keep such runs, but not their work.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import pairwise
from typing import Final, Generic, TypeVar

from services.router.queue.queue_item import QueueItem

Item = TypeVar("Item", bound=QueueItem)

RUN_MAX: Final = 128
"""A longer run is split into two."""

Rank = tuple[int, float, int]
"""The smallest goes first. The ranks of two items are never equal, so that items are never compared."""


class SortedRuns(Generic[Item]):
    """Items by rank."""

    __slots__ = ("_lasts", "_runs", "_work")

    def __init__(self) -> None:
        self._runs: list[list[tuple[Rank, Item]]] = []
        """No run is empty."""
        self._lasts: list[Rank] = []
        """The last rank of each run."""
        self._work: list[int] = []
        """The work of each run."""

    def add(self, rank: Rank, item: Item) -> None:
        """Insert `item` at its rank."""
        runs, lasts = self._runs, self._lasts
        if not runs:
            runs.append([(rank, item)])
            lasts.append(rank)
            self._work.append(item.ticket.work)
            return
        at = bisect_left(lasts, rank)
        if at == len(runs):
            at -= 1
            run = runs[at]
            run.append((rank, item))
            lasts[at] = rank
        else:
            run = runs[at]
            insort(run, (rank, item))
        self._work[at] += item.ticket.work
        if len(run) > RUN_MAX:
            self._split(at)

    def remove(self, rank: Rank) -> None:
        """Remove the item of `rank`, which must be present."""
        at = bisect_left(self._lasts, rank)
        run = self._runs[at]
        position = _position(run, rank)
        item = run.pop(position)[1]
        if not run:
            del self._runs[at], self._lasts[at], self._work[at]
            return
        self._work[at] -= item.ticket.work
        if position == len(run):
            self._lasts[at] = run[-1][0]

    def work_before(self, rank: Rank) -> int:
        """Return the work of all items with a smaller rank. No item needs to have `rank`."""
        at = bisect_left(self._lasts, rank)
        work = sum(self._work[:at])
        if at < len(self._runs):
            run = self._runs[at]
            work += sum(item.ticket.work for _, item in run[: _position(run, rank)])
        return work

    def __iter__(self) -> Iterator[Item]:
        """Yield the items in order. No item may be added or removed until the end."""
        for run in self._runs:
            for _, item in run:
                yield item

    def __reversed__(self) -> Iterator[Item]:
        for run in reversed(self._runs):
            for _, item in reversed(run):
                yield item

    def _split(self, at: int) -> None:
        run = self._runs[at]
        half = len(run) // 2
        later = run[half:]
        del run[half:]
        work = sum(item.ticket.work for _, item in later)
        self._runs.insert(at + 1, later)
        self._lasts.insert(at, run[-1][0])
        self._work[at] -= work
        self._work.insert(at + 1, work)

    def assert_consistent(self) -> None:
        """Raise AssertionError if an item is in the wrong position, or work is miscounted."""
        entries = [entry for run in self._runs for entry in run]
        assert all(one[0] < other[0] for one, other in pairwise(entries)), "out of order"
        assert all(0 < len(run) <= RUN_MAX for run in self._runs), "a run is empty or too long"
        assert self._lasts == [run[-1][0] for run in self._runs]
        assert self._work == [sum(item.ticket.work for _, item in run) for run in self._runs], (
            "work is miscounted"
        )


def _position(run: list[tuple[Rank, Item]], rank: Rank) -> int:
    """Return the position of `rank` in `run`, or its insertion point."""
    return bisect_left(run, (rank,))  # a tuple that ends sooner is the smaller one
