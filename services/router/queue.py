"""Requests that wait at the router until they may be released: strict bands by priority, first come first served inside.

Pure. Each band has two lanes: resumed requests go ahead of the others. Bounded in number here and in time by each item's
`queue_until_s`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, Generic, Protocol, TypeVar

PRIORITY_MAX: Final = 100
"""Priorities beyond +-100 count as +-100."""

LOOK_AHEAD: Final = 4
"""Requests of the highest band that are tried at a time: one that waits for a busy replica does not hold up the others."""


Lane = tuple[int, bool]
"""Band, and whether it is that of resumed requests."""


class Waiting(Protocol):
    """What the queue needs to know of an item. `ticket` belongs to the queue: 0 while the item is not in it."""

    priority: int
    is_resumed: bool
    ticket: int


Item = TypeVar("Item", bound=Waiting)


class ReleaseQueue(Generic[Item]):
    """Holds items by band. Removing one is O(1): it is marked and skipped later."""

    def __init__(self, requests_max: int) -> None:
        """Of new requests at most `requests_max` wait, of resumed ones as many again."""
        self.requests_max = requests_max
        self._lanes: dict[Lane, deque[tuple[int, Item]]] = {}
        self._counts = {False: 0, True: 0}
        """By `is_resumed`."""
        self._last_ticket = 0

    def __len__(self) -> int:
        return self._counts[False] + self._counts[True]

    def count(self, *, is_resumed: bool) -> int:
        """Return how many resumed, or how many other items wait."""
        return self._counts[is_resumed]

    def is_full(self, *, is_resumed: bool = False) -> bool:
        """True if another item of that kind would be one too many. Items that come back are taken nevertheless."""
        return self._counts[is_resumed] >= self.requests_max

    def add(self, item: Item, *, at_head: bool = False) -> None:
        """Put `item` at the end of its lane, or, if it comes back, in front of it."""
        assert not item.ticket, "an item is queued twice"
        self._last_ticket += 1
        item.ticket = self._last_ticket
        self._counts[item.is_resumed] += 1
        lane = self._lanes.setdefault(lane_of(item), deque())
        if at_head:
            lane.appendleft((item.ticket, item))
        else:
            lane.append((item.ticket, item))

    def remove(self, item: Item) -> bool:
        """Take `item` out. Return False if it was not in."""
        if not item.ticket:
            return False
        item.ticket = 0
        self._counts[item.is_resumed] -= 1
        self._tidy(lane_of(item))
        return True

    def heads(self) -> Iterator[Item]:
        """Yield what may be released next, at most LOOK_AHEAD items of the highest band. Items may be removed meanwhile."""
        if not self._lanes:
            return
        highest, _ = max(self._lanes)
        chosen: list[tuple[int, Item]] = []
        for is_resumed in (True, False):
            for ticket, item in self._lanes.get((highest, is_resumed), ()):
                if len(chosen) == LOOK_AHEAD:
                    break
                if item.ticket == ticket:
                    chosen.append((ticket, item))
        for ticket, item in chosen:
            if item.ticket == ticket:
                yield item

    def __iter__(self) -> Iterator[Item]:
        for lane in sorted(self._lanes, reverse=True):
            for ticket, item in self._lanes[lane]:
                if item.ticket == ticket:
                    yield item

    def _tidy(self, key: Lane) -> None:
        lane = self._lanes[key]
        while lane and lane[0][1].ticket != lane[0][0]:
            lane.popleft()
        while lane and lane[-1][1].ticket != lane[-1][0]:
            lane.pop()
        if not lane:
            del self._lanes[key]

    def assert_consistent(self) -> None:
        """Raise AssertionError if a count is wrong or an empty lane is kept."""
        for is_resumed in (False, True):
            waiting = sum(item.is_resumed is is_resumed for item in self)
            assert self._counts[is_resumed] == waiting, "a count of the queue is wrong"
        for key, lane in self._lanes.items():
            assert lane, f"lane {key} is empty"
            assert all(lane[end][1].ticket == lane[end][0] for end in (0, -1)), f"lane {key} is untidy"


def lane_of(item: Waiting) -> Lane:
    """Return the lane of `item`; higher ones go first."""
    return band_of(item.priority), item.is_resumed


def band_of(priority: int) -> int:
    """Return the band of `priority`: higher goes first."""
    return max(-PRIORITY_MAX, min(PRIORITY_MAX, priority))
