"""Unreachable clients: the connection does not end, but keepalive ends the requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.integration.engine.servers import Client, launch, request
from tests.integration.live_mesh import until

NOTICED_S_MAX = 20.0
"""The server pings every 2 s and waits 3 s for the answer; its own default is two hours."""


class Wire:
    """A proxy between a client and a server; after `mute` it swallows all bytes, and both ends wait."""

    def __init__(self, address: str) -> None:
        self.is_muted = False
        self._host, _, self._port = address.rpartition(":")

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Yield the address of the proxy."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()[:2]
            yield f"{host}:{port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, int(self._port))
        try:
            await asyncio.gather(self._pass(reader, back), self._pass(there, writer))
        except OSError:
            pass  # either end has closed
        finally:
            back.close()
            writer.close()

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            if not self.is_muted:
                sink.write(data)
                await sink.drain()
        if not self.is_muted:
            sink.close()


async def test_requests_of_a_silent_client_end_long_before_their_end(tmp_path: Path) -> None:
    """Two requests with minutes of output left; another client is served all the time."""
    server = launch(tmp_path, "--step-s=0.5", "--max-running=4")
    try:
        await asyncio.to_thread(server.wait_ready)
        wire, direct = Wire(server.grpc), Client(server.grpc)
        async with wire.open() as address:
            silent = Client(address)
            calls = [silent.stream(request([first, 5, 6, 7], 1000), timeout_s=600) for first in (1, 2)]
            for call in calls:
                async for _ in call:
                    break

            async def running() -> int:
                async for report in direct.subscribe("load_report"):
                    return int(report["sequences_running"])
                raise AssertionError("no report")

            async def are_running() -> bool:
                return await running() == 2

            async def are_gone() -> bool:
                return await running() == 0

            await until(are_running, 10, "both run")
            wire.is_muted = True
            await until(are_gone, NOTICED_S_MAX, "the requests of the silent client have ended", every_s=0.2)
            assert (await direct.run([9, 9, 9], 2)).error is None
            for call in calls:
                call.cancel()
            await silent.close()
        await direct.close()
    finally:
        server.kill()
