"""Entries in order, kept in short runs: whatever waits, a change shifts no more than one run. Pure.

Finding the run is a bisection over the last entry of each. Beside each run stands the work in it, so that the work in
front of an entry is a sum over runs and a part of one: some microseconds for tens of thousands of entries. Heaps with lazy
removal would cost as much to change, and could tell neither that nor the order from the end; libraries of sorted lists
keep such runs, but not the work in them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import pairwise
from typing import Final, Generic, TypeVar

from services.router.queue.queue_item import QueueItem

Item = TypeVar("Item", bound=QueueItem)

RUN_MAX: Final = 128
"""A longer run becomes two."""

Rank = tuple[int, float, int]
"""The smallest first; of two items never equal, so that items are never compared."""


class SortedRuns(Generic[Item]):
    """Items by rank."""

    __slots__ = ("_lasts", "_runs", "_work")

    def __init__(self) -> None:
        self._runs: list[list[tuple[Rank, Item]]] = []
        """None is empty."""
        self._lasts: list[Rank] = []
        """Of each run."""
        self._work: list[int] = []
        """Of each run."""

    def add(self, rank: Rank, item: Item) -> None:
        """Put `item` where it belongs."""
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
        """Take out the item of `rank`, which must be in."""
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
        """Return the work of all items with a smaller rank; `rank` may be nobody's."""
        at = bisect_left(self._lasts, rank)
        work = sum(self._work[:at])
        if at < len(self._runs):
            run = self._runs[at]
            work += sum(item.ticket.work for _, item in run[: _position(run, rank)])
        return work

    def __iter__(self) -> Iterator[Item]:
        """Yield the items in order. They must not change meanwhile."""
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
        """Raise AssertionError if an item is in the wrong place, or work is miscounted."""
        entries = [entry for run in self._runs for entry in run]
        assert all(one[0] < other[0] for one, other in pairwise(entries)), "out of order"
        assert all(0 < len(run) <= RUN_MAX for run in self._runs), "a run is empty or too long"
        assert self._lasts == [run[-1][0] for run in self._runs]
        assert self._work == [sum(item.ticket.work for _, item in run) for run in self._runs], (
            "work is miscounted"
        )


def _position(run: list[tuple[Rank, Item]], rank: Rank) -> int:
    """Return where `rank` is in `run`, or would be."""
    return bisect_left(run, (rank,))  # a tuple that ends sooner is the smaller one
