"""Open calls of one method that answers one message with a stream, as Health.Watch does: how many, and which gives way.

Pure. Overflow behaviour: the connection with the most watches loses its oldest one to a connection with fewer; a connection
that has the most itself is refused.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from kvmesh.unread_calls import full

StreamKey = TypeVar("StreamKey", bound=Hashable)


class StreamLimit(Generic[StreamKey]):
    """INVARIANT: at most `streams_max` are open; a connection without a watch is forgotten."""

    def __init__(self, method: str, streams_max: int) -> None:
        self.method = method
        self.streams_max = streams_max
        self._connections: dict[str, dict[StreamKey, None]] = {}
        """Watches by connection, the oldest first."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def open(self, connection: str, stream: StreamKey) -> StreamKey | None:
        """Take `watch` in; return the one that gives way to it, already forgotten. Raises MeshError (CALLS_FULL)."""
        evicted = None
        if self._count >= self.streams_max:
            largest = max(self._connections, key=lambda each: len(self._connections[each]))
            most, held = len(self._connections[largest]), len(self._connections.get(connection, ()))
            if most <= held + 1:
                limit = self.streams_max
                what = (
                    f"{self._count} calls of {self.method} are open, {held} of them of this connection; "
                    f"{limit} are allowed"
                )
                raise full(what, self._count, limit)
            evicted = next(iter(self._connections[largest]))
            self.close(largest, evicted)
        self._connections.setdefault(connection, {})[stream] = None
        self._count += 1
        return evicted

    def close(self, connection: str, stream: StreamKey) -> None:
        """Forget `watch`, if it is not forgotten."""
        held = self._connections.get(connection, {})
        if stream not in held:
            return
        del held[stream]
        self._count -= 1
        if not held:
            del self._connections[connection]
