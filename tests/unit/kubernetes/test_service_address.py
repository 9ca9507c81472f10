"""tests/integration/upgrade/service_address.py: connections by way of a Service."""

from __future__ import annotations

import asyncio

from tests.integration.upgrade.service_address import service_address
from tests.patience import wait_for


async def test_without_a_ready_pod_a_connection_is_closed() -> None:
    """While all pods restart there is none. A later connection reaches the new one."""
    ready: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(2))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    pod = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, service_address(lambda: ready) as address:
        assert await answered(address) == b""
        ready.append(pod)
        assert await answered(address) == b"hi"


async def answered(address: str) -> bytes:
    """Return what comes back for two bytes; nothing from a connection that is closed."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"hi")
    try:
        return await wait_for(reader.read(2), 5.0)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
