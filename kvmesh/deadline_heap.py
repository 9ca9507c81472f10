"""When to look at which item next. Pure.

Deadlines that move back with every token would cost a heap operation per token. So an item is looked at when its
*earliest* moment comes; whoever looks finds out what is really due and names the next moment.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class DeadlineHeap(Generic[Item]):
    """Items with the time each is to be looked at. At most one time per item: the earliest that was asked for."""

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
        """Look at `item` no later than `at_s`."""
        if at_s < self._at_s.get(item, float("inf")):
            self._at_s[item] = at_s
            self._count += 1  # keeps the heap from comparing items
            heapq.heappush(self._heap, (at_s, self._count, item))

    def forget(self, item: Item) -> None:
        """Look at `item` no more; unknown items are ignored."""
        self._at_s.pop(item, None)
        if len(self._heap) > 64 + 4 * len(self._at_s):
            self._heap = [entry for entry in self._heap if self._at_s.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def at_s(self, item: Item) -> float | None:
        """Return when `item` is to be looked at, or None."""
        return self._at_s.get(item)

    def next_s(self) -> float | None:
        """Return the next time something is to be looked at, or None."""
        heap, at_s = self._heap, self._at_s
        while heap and at_s.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now_s: float) -> list[Item]:
        """Take out and return the items to look at now, earliest first."""
        items = []
        while (at_s := self.next_s()) is not None and at_s <= now_s:
            item = heapq.heappop(self._heap)[2]
            del self._at_s[item]
            items.append(item)
        return items
