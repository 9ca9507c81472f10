"""Links: the client end against the batched server and against a server of grpcio, and each way to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from kvmesh.http2.client import LinkCall, LinkChannel
from kvmesh.http2.connection import ConnectionLimits
from tests.patience import wait_for
from tests.unit.http2.echo import SERVICE, batched, echoing, stock

LIMITS = ConnectionLimits(keepalive_s=60.0, handshake_s=10.0)
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it


def plain(data: bytes) -> bytes:
    return data


@asynccontextmanager
async def linked(address: str, limits: ConnectionLimits = LIMITS) -> AsyncIterator[LinkCall]:
    channel = LinkChannel(address, None, message_bytes_max=-1, limits=limits)
    try:
        yield channel.stream_stream(f"/{SERVICE}/Both", plain, plain)()
    finally:
        await wait_for(channel.close(), 10)


@pytest.mark.parametrize("served", [stock, batched])
async def test_messages_of_each_size_come_back_in_order(served: Any) -> None:
    async with served() as address, linked(address) as call:
        for size in (0, 1, 16_384, 70_000, 500_000):
            await wait_for(call.write(bytes(size)), 10)
            assert await wait_for(call.read(), 10) == bytes(size)
        many = [bytes([number % 256]) * number for number in range(300)]
        for message in many:
            await wait_for(call.write(message), 10)
        assert [await wait_for(call.read(), 10) for _ in many] == many


@pytest.mark.parametrize("served", [stock, batched])
async def test_a_cancel_ends_the_reader_and_the_status_says_so(served: Any) -> None:
    async with served() as address, linked(address) as call:
        await call.write(b"x")
        assert await call.read() == b"x"
        reading = asyncio.ensure_future(call.read())
        await asyncio.sleep(0)
        assert call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wait_for(reading, 10)
        assert await call.code() is grpc.StatusCode.CANCELLED
        assert not call.cancel()
        with pytest.raises(grpc.aio.UsageError):
            await call.write(b"y")


async def test_a_refused_connection_is_a_status(free_port: int) -> None:
    async with linked(f"127.0.0.1:{free_port}") as call:
        assert await wait_for(call.read(), 10) is EOF
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert "failed to connect" in await call.details()


async def test_a_lost_connection_is_a_status() -> None:
    async with echoing() as (server, _, address), linked(address) as call:
        await call.write(b"x")
        assert await call.read() == b"x"
        for connection in list(server._connections):  # the server's own set: no other way to cut one
            connection.abort("cut")
        assert await wait_for(call.read(), 10) is EOF
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_status_of_a_server_that_stops_arrives_after_the_messages_before_it() -> None:
    async with echoing() as (server, _, address), linked(address) as call:
        await call.write(b"x")
        await wait_for(server.stop(0.05), 10)
        assert await wait_for(call.read(), 10) == b"x"
        assert await wait_for(call.read(), 10) is EOF
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_peer_that_is_no_grpc_server_is_a_status() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, linked(f"127.0.0.1:{port}") as call:
        assert await wait_for(call.read(), 10) is EOF
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_channel_closes_while_it_connects() -> None:
    """A peer that accepts and says nothing holds neither the close nor a call."""

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1_000):
            pass
        writer.close()
        await writer.wait_closed()

    silent = await asyncio.start_server(swallow, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with silent:
        async with linked(f"127.0.0.1:{port}") as call:
            reading = asyncio.ensure_future(call.read())
            await asyncio.sleep(0)
        await asyncio.wait((reading,), timeout=10)
        assert reading.done()
        assert await wait_for(call.code(), 10) in {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}
