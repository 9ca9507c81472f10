"""Heap of items by the time of their next check. Pure.

Deadlines that move back with every token would cost a heap operation per token. So an item is checked at its *earliest*
time. The caller then finds out which deadline is really due, and schedules the next check.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class DeadlineHeap(Generic[Item]):
    """Items with the time of their next check. INVARIANT: one time per item, the earliest that was requested."""

    __slots__ = ("_at_s", "_count", "_heap")

    def __init__(self) -> None:
        self._at_s: dict[Item, float] = {}
        self._heap: list[tuple[float, int, Item]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._at_s)

    def __contains__(self, item: Item) -> bool:
        return item in self._at_s

    def by(self, item: Item, at_s: float) -> None:
        """Schedule a check of `item` no later than `at_s`."""
        if at_s < self._at_s.get(item, float("inf")):
            self._at_s[item] = at_s
            self._count += 1  # keeps the heap from comparing items
            heapq.heappush(self._heap, (at_s, self._count, item))

    def forget(self, item: Item) -> None:
        """Remove `item`. Unknown items are ignored."""
        self._at_s.pop(item, None)
        if len(self._heap) > 64 + 4 * len(self._at_s):
            self._heap = [entry for entry in self._heap if self._at_s.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def at_s(self, item: Item) -> float | None:
        """Return the time of the next check of `item`, or None."""
        return self._at_s.get(item)

    def next_s(self) -> float | None:
        """Return the time of the next check, or None."""
        heap, at_s = self._heap, self._at_s
        while heap and at_s.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now_s: float) -> list[Item]:
        """Take out and return the items to check now, earliest first."""
        items = []
        while (at_s := self.next_s()) is not None and at_s <= now_s:
            item = heapq.heappop(self._heap)[2]
            del self._at_s[item]
            items.append(item)
        return items
