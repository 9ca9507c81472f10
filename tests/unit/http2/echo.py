"""A small service on the batched server: echoes of each kind of method, and ways to go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc

from kvmesh.http2.connection import ConnectionLimits
from kvmesh.http2.server import BatchedServer, EdgeLimits
from kvmesh.http2.server_connection import CallLimits
from kvmesh.trust.server_credentials import ServerTls

SERVICE = "test.Echo"
MESSAGE_BYTES_MAX = 1 << 20


class Echo:
    """The handlers. Messages are bytes."""

    def __init__(self) -> None:
        self.running = 0
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.allowed = asyncio.Event()
        self.seen: list[Any] = []

    async def unary(self, request: bytes, context: Any) -> bytes:
        """Echo one message; words ask for more."""
        self.seen.append((context.invocation_metadata(), context.time_remaining(), context.peer()))
        if request == b"abort":
            context.set_trailing_metadata((("unused", "x"),))
            await context.abort(
                grpc.StatusCode.NOT_FOUND, "nö 100%", (("details-bin", b"\0\xff"), ("text", "yes"))
            )
        if request == b"bug":
            raise ValueError("secret internals")
        if request == b"hang":
            await self._hang()
        context.set_trailing_metadata((("trailer", "t"),))
        return request

    async def split(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """Answer each byte as a message."""
        for byte in request:
            yield bytes([byte])

    async def large(self, request: bytes, context: Any) -> None:
        """Write messages of 100,000 bytes, as many as the request says; note each that was taken."""
        for number in range(int(request)):
            await context.write(bytes([number % 256]) * 100_000)
            self.seen.append(number)

    async def unread(self, request: bytes, context: Any) -> None:
        """Give up a write that the client does not take, and then the wait for the status."""
        with suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await context.write(request)
        try:
            async with asyncio.timeout(0.01):
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "slow reader")
        except TimeoutError:
            raise asyncio.CancelledError from None
        finally:
            self.cancelled.set()

    async def join(self, messages: AsyncIterator[bytes], context: Any) -> bytes:
        """Return all messages as one."""
        return b"|".join([message async for message in messages])

    async def both(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Echo each message as it comes."""
        async for message in messages:
            yield message

    async def waiting(self, _: AsyncIterator[bytes], context: Any) -> bytes:
        """Read the message that has begun to arrive when the test allows it; note what arrives, and its size."""
        self.seen.append(await context.arrives())
        self.entered.set()
        await self.allowed.wait()
        self.seen += [len(await context.read()), await context.arrives()]
        return b""

    async def _hang(self) -> None:
        self.running += 1
        self.entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.running -= 1
            self.cancelled.set()


@asynccontextmanager
async def echoing(
    tls: ServerTls | None = None,
    *,
    keepalive_s: float = 60.0,
    streams_max: int = 1_000,
    connections_max: int = 100,
) -> AsyncIterator[tuple[BatchedServer, Echo, str]]:
    """Serve Echo, and yield the server, the handlers and the address."""
    calls = CallLimits(streams_max=streams_max, message_bytes_max=MESSAGE_BYTES_MAX, metadata_bytes_max=8_192)
    limits = EdgeLimits(
        calls=calls,
        connections=ConnectionLimits(keepalive_s=keepalive_s, handshake_s=10.0),
        connections_max=connections_max,
    )
    server, echo = BatchedServer((), limits), Echo()
    server.add_registered_method_handlers(
        SERVICE,
        {
            "Unary": grpc.unary_unary_rpc_method_handler(echo.unary),
            "Split": grpc.unary_stream_rpc_method_handler(echo.split),
            "Unread": grpc.unary_stream_rpc_method_handler(echo.unread),
            "Waiting": grpc.stream_unary_rpc_method_handler(echo.waiting),
            "Large": grpc.unary_stream_rpc_method_handler(echo.large),
            "Join": grpc.stream_unary_rpc_method_handler(echo.join),
            "Both": grpc.stream_stream_rpc_method_handler(echo.both),
        },
    )
    where = "127.0.0.1:0"
    port = server.add_secure_port(where, tls) if tls else server.add_insecure_port(where)
    await server.start()
    try:
        yield server, echo, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def stock(streams_max: int = 100) -> AsyncIterator[str]:
    """Serve `Both` of Echo with grpcio, and yield the address."""
    server, echo = grpc.aio.server(options=[("grpc.max_concurrent_streams", streams_max)]), Echo()
    handlers = {"Both": grpc.stream_stream_rpc_method_handler(echo.both)}
    server.add_registered_method_handlers(SERVICE, handlers)  # type: ignore[attr-defined]  # the stubs lack it
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def batched(streams_max: int = 100) -> AsyncIterator[str]:
    """Serve Echo with the batched server, and yield the address."""
    async with echoing(streams_max=streams_max) as (_, _, address):
        yield address
