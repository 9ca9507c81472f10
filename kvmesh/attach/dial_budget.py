"""Rate limit of new connections of a process: a token bucket, and the order of the attempts that wait. Pure.

INVARIANT: over any window of w seconds at most BURST + RATE_PER_S x w connections are granted, less those refunded.

Two connections belong to one attempt: a probe, then the connection of gRPC. So BURST lets 64 members attach at once.
Attempts with the fewest dials since a steady stream go first. A process that registers among a thousand dead addresses does
not wait for their retries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Final

RATE_PER_S: Final = 20.0
BURST: Final = 128.0


@dataclass(slots=True, order=True)
class DialTicket:
    """One attempt that waits for its connections."""

    dials: int
    """Dials of the peer since its last steady stream."""
    number: int
    connections: int = field(compare=False)
    is_withdrawn: bool = field(default=False, compare=False)


class DialBudget:
    """The token bucket of one process. `enqueue` an attempt, then call `due` at `next_s`."""

    def __init__(self, now_s: float, rate_per_s: float = RATE_PER_S, burst: float = BURST) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._tokens = burst
        self._at_s = now_s
        self._waiting: list[DialTicket] = []
        self._numbers = count()

    def __len__(self) -> int:
        return sum(not ticket.is_withdrawn for ticket in self._waiting)

    def enqueue(self, dials: int, connections: int) -> DialTicket:
        """Add an attempt that needs `connections`, to a peer dialled `dials` times since its last steady stream."""
        ticket = DialTicket(dials, next(self._numbers), connections)
        heappush(self._waiting, ticket)
        return ticket

    def due(self, now_s: float) -> list[DialTicket]:
        """Take out and return the attempts that may start now, in order. Their connections are granted."""
        self._refill(now_s)
        granted = []
        while self._waiting:
            first = self._waiting[0]
            if not first.is_withdrawn and first.connections > self._tokens:
                break
            heappop(self._waiting)
            if not first.is_withdrawn:
                self._tokens -= first.connections
                granted.append(first)
        return granted

    def next_s(self) -> float | None:
        """Return the time at which the next attempt is due, or None if none waits."""
        if not self._waiting:
            return None
        return self._at_s + max(0.0, self._waiting[0].connections - self._tokens) / self._rate_per_s

    def try_take(self, now_s: float) -> bool:
        """Take one connection unless an attempt waits."""
        self._refill(now_s)
        if self._waiting or self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def refund(self, connections: int) -> None:
        """Put back connections that were granted and not opened."""
        self._tokens = min(self._burst, self._tokens + connections)

    def _refill(self, now_s: float) -> None:
        elapsed_s, self._at_s = max(0.0, now_s - self._at_s), max(self._at_s, now_s)
        self._tokens = min(self._burst, self._tokens + elapsed_s * self._rate_per_s)
