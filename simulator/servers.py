"""Simulated prefill replicas: one prompt at a time, a queue, a cache. Pure."""

from __future__ import annotations

import heapq
from enum import StrEnum

from kvmesh.queue_order import ORDERS
from simulator.lru import BlockCache


class ServiceOrder(StrEnum):
    """The order of service in a replica's queue."""

    FIFO = "fifo"
    SHORTEST = "shortest"
    """Shortest job first with aging, so that no prompt starves (kvmesh.queue_order)."""


class Server:
    """One replica. A running prompt is not interrupted."""

    def __init__(self, capacity: float, order: ServiceOrder) -> None:
        self.cache = BlockCache(capacity)
        self.running: int | None = None
        """Index of the request."""
        self.hit_blocks = 0
        """Cached blocks of the running prompt."""
        self.busy_s = 0.0
        self.ends_s = 0.0
        """When the running prompt will be done."""
        self.generation = 0
        """Number of times that the replica was lost."""
        self._capacity = capacity
        self._key = ORDERS[order.value]
        self._queue: list[tuple[float, int, int]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, index: int, expected_s: float, arrived_s: float) -> None:
        """Queue a request that came to the replica at `arrived_s`."""
        self._arrivals += 1
        heapq.heappush(self._queue, (self._key(expected_s, arrived_s), self._arrivals, index))

    def pop(self) -> int:
        """Remove and return the next request."""
        return heapq.heappop(self._queue)[2]

    def lose(self, now_s: float) -> list[int]:
        """Lose cache, queue and running prompt. Return the lost requests in the order of service."""
        lost = [self.running] if self.running is not None else []
        if self.running is not None:
            self.busy_s -= self.ends_s - now_s
        while self._queue:
            lost.append(self.pop())
        self.running = None
        self.cache = BlockCache(self._capacity)
        self.generation += 1
        return lost
