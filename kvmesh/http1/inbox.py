"""The input of a connection, in reads of READ_BYTES at most. uvloop itself reads up to 256 KB at once."""

from __future__ import annotations

import asyncio


class Inbox(asyncio.BufferedProtocol):
    """Passes events and input on to `protocol`. `buffer` may serve all connections: each read is copied at once.

    uvloop passes buffers on to protocols alone that are no asyncio.Protocol, as uvicorn's are.
    """

    def __init__(self, protocol: asyncio.Protocol, buffer: memoryview) -> None:
        self._protocol = protocol
        self._buffer = buffer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.BaseProtocol."""
        self._protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.BaseProtocol."""
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        """See asyncio.BaseProtocol."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """See asyncio.BaseProtocol."""
        self._protocol.resume_writing()

    def eof_received(self) -> bool | None:
        """See asyncio.BufferedProtocol."""
        return self._protocol.eof_received()

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio.BufferedProtocol."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio.BufferedProtocol."""
        self._protocol.data_received(bytes(self._buffer[:nbytes]))
