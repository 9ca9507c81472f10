"""The open connections of an HTTP server: their number, and the idle ones in order. No I/O here."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Idle(Protocol):
    """The part of a connection that is used here."""

    def evict(self) -> None:
        """Close the connection, which has no request."""
        ...


class Connections:
    """See the module. INVARIANT: `idle` is a subset of `open`."""

    def __init__(self, connections_max: int) -> None:
        self._connections_max = connections_max
        self.open: set[Idle] = set()
        self.idle: dict[Idle, None] = {}
        """Connections without a request, the longest idle one first."""
        self.refused_total = 0
        self.evicted_total = 0
        self.is_empty = asyncio.Event()
        self.is_empty.set()

    def __len__(self) -> int:
        return len(self.open)

    def add(self, connection: Idle) -> bool:
        """Take a new connection, which is idle. False: it must be closed at once, because all others have requests."""
        if len(self.open) >= self._connections_max:
            longest = next(iter(self.idle), None)
            if longest is None:
                self.refused_total += 1
                return False
            self.evicted_total += 1
            self.discard(longest)
            longest.evict()
        self.open.add(connection)
        self.idle[connection] = None
        self.is_empty.clear()
        return True

    def set_busy(self, connection: Idle) -> None:
        """Note that `connection` has a request."""
        self.idle.pop(connection, None)

    def set_idle(self, connection: Idle) -> None:
        """Note that `connection` has no request any more."""
        if connection in self.open:
            self.idle[connection] = None

    def discard(self, connection: Idle) -> None:
        """Forget a connection that is lost. Idempotent."""
        self.open.discard(connection)
        self.idle.pop(connection, None)
        if not self.open:
            self.is_empty.set()
