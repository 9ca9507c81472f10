"""A server of connections that a test answers, which leaves nothing open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from tests.patience import patience

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def answering_server(serve: Serve) -> AsyncIterator[int]:
    """Yield the port of a server that runs `serve` per connection.

    Raises TimeoutError if a connection is still open at the end.
    """
    tasks: set[asyncio.Task[None]] = set()

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await serve(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(run(reader, writer)))

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
    async with patience(5):
        await asyncio.gather(*tasks)
