"""The metrics port of a process: HTTP for scrapers and probes. `metrics_answers` has its paths and responses.

Each connection gets one response. It has CONNECTION_S_MAX for its request and for the reading of the response. There is no
task for a connection, and none is left behind when the port closes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, cast

from kvmesh.metrics import Metrics
from kvmesh.metrics_answers import HEAD_BYTES_MAX, Sources, fault, response

log = logging.getLogger(__name__)

CONNECTION_S_MAX: Final = 5.0
"""Time for a client to send its request and read the response. Then the connection is closed."""


@asynccontextmanager
async def exposed(
    metrics: Metrics, unready_reason: Callable[[], str], host: str, port: int
) -> AsyncIterator[str]:
    """Serve the pages of the metrics port on `port` (0: a free port) inside the block, and yield `host:port`.

    `unready_reason` returns why the process is not ready, or an empty text. Raises OSError if the port is in use.
    """
    connections = _Connections(Sources(metrics.text, unready_reason))
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(connections), host, port)
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"{shown}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await connections.close()


class _Connections:
    """The open connections of one port."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.is_closed = False
        self._transports: set[asyncio.Transport] = set()
        self._are_lost = asyncio.Event()
        self._are_lost.set()

    def add(self, transport: asyncio.Transport) -> None:
        """Take a new connection. One that comes behind the close is aborted."""
        self._transports.add(transport)
        self._are_lost.clear()
        if self.is_closed:
            transport.abort()

    def discard(self, transport: asyncio.Transport) -> None:
        """Forget a connection that is lost."""
        self._transports.discard(transport)
        if not self._transports:
            self._are_lost.set()

    async def close(self) -> None:
        """Abort all connections, and return when they are lost."""
        self.is_closed = True
        for transport in tuple(self._transports):
            transport.abort()
        await self._are_lost.wait()


class _Connection(asyncio.Protocol):
    """One connection: it reads the head of a request, writes the response, and ends with the client's end."""

    def __init__(self, connections: _Connections) -> None:
        self._connections = connections
        self._received = bytearray()
        self._is_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)
        self._timer = asyncio.get_running_loop().call_later(CONNECTION_S_MAX, self._transport.abort)
        self._connections.add(self._transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._received += data[: HEAD_BYTES_MAX - len(self._received)]
        # A head ends with a line, so a part without the end of a line needs no look.
        if self._is_answered or not (b"\n" in data or len(self._received) == HEAD_BYTES_MAX):
            return
        try:
            answer = response(bytes(self._received), self._connections.sources)
        except Exception:
            log.exception("bug in a page of the metrics port")
            answer = fault()
        if answer is not None:
            self._is_answered = True
            self._transport.write(answer)
            self._transport.write_eof()  # a close with unread bytes would reset the connection, and lose the answer

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._timer.cancel()
        self._connections.discard(self._transport)
