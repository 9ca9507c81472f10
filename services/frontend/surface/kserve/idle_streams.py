"""The streams without a request: a limit on their number, and on the time of each.

Overflow behaviour: that of `StreamLimit`. A stream with a request is never ended here.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from kvmesh.errors import MeshError
from kvmesh.stream_limit import StreamLimit
from kvmesh.unread_calls import full

STREAMS_MAX: Final = 1_000
"""Streams without a request, of all clients."""

IDLE_S: Final = 600.0
"""Longest time of a stream without a request."""


class Endable(Protocol):
    """A stream that can be ended while it is idle."""

    peer: str

    def end(self, error: MeshError) -> None:
        """End the stream with the status of `error`."""
        ...


class IdleStreams:
    """See the module."""

    def __init__(self, method: str, streams_max: int = STREAMS_MAX) -> None:
        self._limit: StreamLimit[Any] = StreamLimit(method, streams_max)

    def __len__(self) -> int:
        return len(self._limit)

    def open(self, stream: Endable) -> None:
        """Note that `stream` is idle; end another one if there are too many. Raises MeshError (CALLS_FULL)."""
        evicted = self._limit.open(stream.peer, stream)
        if evicted is not None:
            what = f"this idle stream of {self._limit.method} was ended for one of a connection with fewer streams"
            evicted.end(full(what, len(self._limit), self._limit.streams_max))

    def close(self, stream: Endable) -> None:
        """Note that `stream` has a request, or has ended. Idempotent."""
        self._limit.close(stream.peer, stream)


def expired() -> MeshError:
    """Return the end of a stream that was idle for too long."""
    return MeshError(
        "REQUEST_TIMEOUT",
        f"the stream had no request for {IDLE_S:g} s; open another one",
        {"limit_s": f"{IDLE_S:g}"},
    )
