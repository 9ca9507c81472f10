"""The one address of a Service of Kubernetes: each new connection goes to a ready pod, and stays there (layer 4)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

_PIECE_BYTES: Final = 1 << 16


class _Forwarder:
    """Copies the bytes of each connection between the client and the pod that it was given."""

    def __init__(self, ready: Callable[[], Sequence[str]], group: asyncio.TaskGroup) -> None:
        self._ready = ready
        self._group = group
        self._choice = random.Random()
        self.connections: set[asyncio.Task[None]] = set()

    def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._group.create_task(self._forward(reader, writer), name="connection of the Service")
        self.connections.add(task)
        task.add_done_callback(self.connections.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not (ready := self._ready()):
                return
            host, _, port = self._choice.choice(ready).rpartition(":")
            pod_reader, pod_writer = await asyncio.open_connection(host, int(port))
            try:
                await asyncio.gather(_copy(reader, pod_writer), _copy(pod_reader, writer))
            finally:
                pod_writer.transport.abort()
        except OSError:
            pass  # the client sees a closed connection
        finally:
            writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()


@asynccontextmanager
async def service_address(ready: Callable[[], Sequence[str]]) -> AsyncIterator[str]:
    """Yield the address. `ready`: the addresses of the pods that get new connections; without one they are closed.

    An error of a connection, other than those of sockets, ends the block and is raised in a group.
    """
    async with asyncio.TaskGroup() as group:
        forwarder = _Forwarder(ready, group)
        server = await asyncio.start_server(forwarder.on_connection, "127.0.0.1", 0)
        try:
            host, port = server.sockets[0].getsockname()
            yield f"{host}:{port}"
        finally:
            server.close()
            for task in forwarder.connections:
                task.cancel()
