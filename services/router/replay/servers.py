"""Prefill replicas as they are simulated: one prompt at a time, a queue, a cache. Pure."""

from __future__ import annotations

import heapq
from enum import StrEnum
from typing import Final

from services.router.replay.lru import BlockCache

AGEING: Final = 0.3
"""Seconds of work that a second of waiting outweighs."""


class Order(StrEnum):
    """Who is served next."""

    FIFO = "fifo"
    SHORTEST = "shortest"
    """The smallest of (expected seconds - AGEING * wait): short ones first, and nobody waits for ever."""


class Server:
    """One replica. What runs is not interrupted."""

    def __init__(self, capacity: float, order: Order) -> None:
        self.cache = BlockCache(capacity)
        self.running: int | None = None
        """Index of the request."""
        self.hit_blocks = 0
        """Of what runs."""
        self.busy_s = 0.0
        self._order = order
        self._queue: list[tuple[float, int, int]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, index: int, expected_s: float, arrived_s: float) -> None:
        """Queue a request.

        All waits grow alike, so the order of two never changes: it is that of (expected seconds + AGEING * arrival).
        """
        self._arrivals += 1
        rank = expected_s + AGEING * arrived_s if self._order is Order.SHORTEST else 0.0
        heapq.heappush(self._queue, (rank, self._arrivals, index))

    def pop(self) -> int:
        """Take out who is served next."""
        return heapq.heappop(self._queue)[2]
