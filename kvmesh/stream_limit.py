"""Concurrency limit for open calls of a method that answers one message with a stream, for example Health.Watch. Pure.

Overflow behaviour: a call evicts the oldest stream of the connection with the most streams, if its own connection has
at least two streams fewer. Any other call is refused.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from kvmesh.unread_calls import full

StreamKey = TypeVar("StreamKey", bound=Hashable)


class StreamLimit(Generic[StreamKey]):
    """The open streams of one method.

    INVARIANT: at most `streams_max` streams are open, and no connection without a stream is kept.
    """

    def __init__(self, method: str, streams_max: int) -> None:
        self.method = method
        self.streams_max = streams_max
        self._connections: dict[str, dict[StreamKey, None]] = {}
        """Streams by connection, the oldest first."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def open(self, connection: str, stream: StreamKey) -> StreamKey | None:
        """Admit `stream`. Return the stream that it evicts, which is removed already. Raises MeshError (CALLS_FULL)."""
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
        """Remove `stream`. A second call is ignored."""
        held = self._connections.get(connection, {})
        if stream not in held:
            return
        del held[stream]
        self._count -= 1
        if not held:
            del self._connections[connection]
