"""Requests that wait at the router until they may be released: strict bands by priority, first come first served inside.

Pure. Bounded in number here and in time by each item's `expires_s`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, Generic, Protocol, TypeVar

PRIORITY_MAX: Final = 100
"""Priorities beyond +-100 count as +-100."""

LOOK_AHEAD: Final = 4
"""Requests of the highest band that are tried at a time: one that waits for a busy replica does not hold up the others."""


class Waiting(Protocol):
    """What the queue needs to know of an item. `ticket` belongs to the queue: 0 while the item is not in it."""

    priority: int
    ticket: int


Item = TypeVar("Item", bound=Waiting)


class ReleaseQueue(Generic[Item]):
    """Holds items by band. Removing one is O(1): it is marked and skipped later."""

    def __init__(self, requests_max: int) -> None:
        self.requests_max = requests_max
        self._bands: dict[int, deque[tuple[int, Item]]] = {}
        self._count = 0
        self._last_ticket = 0

    def __len__(self) -> int:
        return self._count

    def is_full(self) -> bool:
        """True if another item would be one too many. Items that come back are taken nevertheless."""
        return self._count >= self.requests_max

    def add(self, item: Item, *, at_head: bool = False) -> None:
        """Put `item` at the end of its band, or in front of it."""
        assert not item.ticket, "an item is queued twice"
        self._last_ticket += 1
        item.ticket = self._last_ticket
        self._count += 1
        band = self._bands.setdefault(band_of(item.priority), deque())
        if at_head:
            band.appendleft((item.ticket, item))
        else:
            band.append((item.ticket, item))

    def remove(self, item: Item) -> bool:
        """Take `item` out. Return False if it was not in."""
        if not item.ticket:
            return False
        item.ticket = 0
        self._count -= 1
        self._tidy(band_of(item.priority))
        return True

    def heads(self) -> Iterator[Item]:
        """Yield what may be released next, at most LOOK_AHEAD items of the highest band. Items may be removed meanwhile."""
        if not self._count:
            return
        band = self._bands[max(self._bands)]
        chosen = []
        for ticket, item in band:
            if item.ticket == ticket:
                chosen.append((ticket, item))
                if len(chosen) == LOOK_AHEAD:
                    break
        for ticket, item in chosen:
            if item.ticket == ticket:
                yield item

    def __iter__(self) -> Iterator[Item]:
        for band in sorted(self._bands, reverse=True):
            for ticket, item in self._bands[band]:
                if item.ticket == ticket:
                    yield item

    def _tidy(self, number: int) -> None:
        band = self._bands[number]
        while band and band[0][1].ticket != band[0][0]:
            band.popleft()
        while band and band[-1][1].ticket != band[-1][0]:
            band.pop()
        if not band:
            del self._bands[number]

    def assert_consistent(self) -> None:
        """Raise AssertionError if the count is wrong or an empty band is kept."""
        assert self._count == sum(1 for _ in self), "count of the queue is wrong"
        for number, band in self._bands.items():
            assert band, f"band {number} is empty"
            assert all(band[end][1].ticket == band[end][0] for end in (0, -1)), f"band {number} is untidy"


def band_of(priority: int) -> int:
    """Return the band of `priority`: higher goes first."""
    return max(-PRIORITY_MAX, min(PRIORITY_MAX, priority))
