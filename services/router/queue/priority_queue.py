"""Requests by priority or without, then by their order key, then first come, first served. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

from services.router.queue.queue_item import QueueItem
from services.router.queue.sorted_runs import Rank, SortedRuns

Item = TypeVar("Item", bound=QueueItem)

PRIORITY_MAX: Final = 100
"""Priorities beyond +-100 count as +-100."""


class PriorityQueue(Generic[Item]):
    """Items by priority, then by `order`, then first come, first served. A requeued item goes before all of its priority.

    Without `by_priority` the items go by `order` alone. Such a queue mixes several tenants: a client's priority may not
    move its request before those of other tenants.
    """

    __slots__ = ("_by_priority", "_ranks", "_runs", "count", "work")

    def __init__(self, *, by_priority: bool = True) -> None:
        self._by_priority = by_priority
        self.count = 0
        self.work = 0
        """Sum over all items."""
        self._runs: SortedRuns[Item] = SortedRuns()
        self._ranks: dict[Item, Rank] = {}

    def add(self, item: Item, *, at_head: bool) -> None:
        """Insert `item`, which has its ticket; with `at_head` before all items of its priority."""
        if at_head:
            rank = self._minus_priority(item), float("-inf"), -item.ticket.number
        else:
            rank = self._minus_priority(item), item.ticket.order, item.ticket.number
        self._ranks[item] = rank
        self._runs.add(rank, item)
        self.count += 1
        self.work += item.ticket.work

    def remove(self, item: Item) -> None:
        """Remove `item`."""
        self._runs.remove(self._ranks.pop(item))
        self.count -= 1
        self.work -= item.ticket.work

    def work_before(self, item: Item) -> int:
        """Return the work of all items before `item`, if it were added now."""
        return self._runs.work_before((self._minus_priority(item), item.ticket.order, sys.maxsize))

    def _minus_priority(self, item: Item) -> int:
        return -max(-PRIORITY_MAX, min(PRIORITY_MAX, item.submitted.priority)) if self._by_priority else 0

    def __iter__(self) -> Iterator[Item]:
        return iter(self._runs)

    def __reversed__(self) -> Iterator[Item]:
        return reversed(self._runs)

    def assert_consistent(self) -> None:
        """Raise AssertionError if a count is wrong or an item is in the wrong position."""
        items = list(self)
        assert self.count == len(items) and self.work == sum(item.ticket.work for item in items)
        assert set(items) == set(self._ranks) and all(item.ticket.number for item in items)
        for item, (minus_priority, order, ticket) in self._ranks.items():
            assert minus_priority == self._minus_priority(item)
            assert (order, ticket) in (
                (item.ticket.order, item.ticket.number),
                (float("-inf"), -item.ticket.number),
            ), item
        self._runs.assert_consistent()
