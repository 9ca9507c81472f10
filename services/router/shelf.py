"""Requests of one kind by priority or not, then first come, first served. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from services.router.queue import Waiting

Item = TypeVar("Item", bound="Waiting")
Ticketed = tuple[int, Item]

PRIORITY_MAX: Final = 100
"""Priorities beyond +-100 count as +-100."""


class Shelf(Generic[Item]):
    """Items by priority, then first come, first served. Removed ones are skipped, and dropped from the ends.

    Not `by_priority`: first come, first served alone, where items of several tenants stand together and none shall go
    first because its client says so.
    """

    __slots__ = ("_by_priority", "_lanes", "count", "tokens")

    def __init__(self, *, by_priority: bool = True) -> None:
        self._by_priority = by_priority
        self.count = 0
        self.tokens = 0
        self._lanes: dict[int, deque[Ticketed[Item]]] = {}

    def add(self, item: Item, *, at_head: bool) -> None:
        """Put `item`, which has its ticket, behind or before its equals."""
        priority = self._priority(item)
        lane = self._lanes.get(priority)
        if lane is None:
            lane = self._lanes[priority] = deque()
        if at_head:
            lane.appendleft((item.ticket, item))
        else:
            lane.append((item.ticket, item))
        self.count += 1
        self.tokens += item.token_count

    def removed(self, item: Item) -> None:
        """The ticket of `item` was taken from it: forget it."""
        self.count -= 1
        self.tokens -= item.token_count
        priority = self._priority(item)
        lane = self._lanes[priority]
        while lane and lane[0][1].ticket != lane[0][0]:
            lane.popleft()
        while lane and lane[-1][1].ticket != lane[-1][0]:
            lane.pop()
        if not lane:
            del self._lanes[priority]

    def _priority(self, item: Item) -> int:
        return max(-PRIORITY_MAX, min(PRIORITY_MAX, item.priority)) if self._by_priority else 0

    def __iter__(self) -> Iterator[Ticketed[Item]]:
        lanes = self._lanes
        for priority in sorted(lanes, reverse=True) if len(lanes) > 1 else lanes:
            for entry in lanes[priority]:
                if entry[1].ticket == entry[0]:
                    yield entry

    def __reversed__(self) -> Iterator[Ticketed[Item]]:
        for priority in sorted(self._lanes):
            for entry in reversed(self._lanes[priority]):
                if entry[1].ticket == entry[0]:
                    yield entry

    def assert_consistent(self) -> None:
        """Raise AssertionError if a count is wrong or a lane is untidy."""
        items = [item for _, item in self]
        assert self.count == len(items) and self.tokens == sum(item.token_count for item in items)
        for priority, lane in self._lanes.items():
            assert lane, f"lane {priority} is empty"
            assert all(lane[end][1].ticket == lane[end][0] for end in (0, -1)), f"lane {priority} is untidy"
