"""Every kind of method on a real server: late, missing, malformed and too many messages, and guards before them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh import request_reader as module
from kvmesh.attach.outbox import MESSAGE_BYTES_MAX
from kvmesh.clock import VirtualClock
from kvmesh.errors import MeshError
from kvmesh.interceptors import rewrapped
from kvmesh.request_reader import RequestReader
from kvmesh.server import MeshServer
from kvmesh.unread_calls import READ_MIN_S
from tests.both_transports import transport
from tests.patience import patience
from tests.raw_frames import framed
from tests.raw_http2 import RawConnection, RawStream

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
METHODS = [CHECK, WATCH, REFLECTION]
JUNK = b"\xff" * 20
INVALID_ARGUMENT, DEADLINE_EXCEEDED, PERMISSION_DENIED, RESOURCE_EXHAUSTED = 3, 4, 7, 8

__all__ = ["transport"]


@asynccontextmanager
async def serving(request_reader: RequestReader, guards: Any = ()) -> AsyncIterator[str]:
    """Serve only health and reflection."""
    server = MeshServer("frontend", "frontend-0", [], request_reader=request_reader, guards=guards)
    address = await server.listen("127.0.0.1:0")
    try:
        yield address
    finally:
        await server.grpc.stop(0)


@asynccontextmanager
async def calling(request_reader: RequestReader, method: str, guards: Any = ()) -> AsyncIterator[RawStream]:
    """Serve, and open a call with its headers sent."""
    async with serving(request_reader, guards) as address, RawConnection.connect(address) as connection:
        yield connection.call(method)


@pytest.mark.parametrize("method", METHODS)
async def test_a_missing_message_ends_the_call(method: str) -> None:
    """A call of headers alone stays open for the timeout, and not longer."""
    request_reader = RequestReader(MESSAGE_BYTES_MAX, timeout_s=0.1)
    async with calling(request_reader, method) as stream:
        await stream.ended()
        assert stream.status == DEADLINE_EXCEEDED and "within 0.1 s" in stream.message
    assert request_reader.late_total == 1 and not len(request_reader.unread)


@pytest.mark.parametrize("method", METHODS)
async def test_bytes_that_cannot_be_parsed_are_the_callers_fault(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """INVALID_ARGUMENT, one line in the log, no traceback."""
    caplog.set_level(logging.INFO)
    async with calling(RequestReader(MESSAGE_BYTES_MAX), method) as stream:
        await stream.send_message(JUNK)
        await stream.ended()
        assert stream.status == INVALID_ARGUMENT and method in stream.message
    (line,) = [record for record in caplog.records if record.levelno >= logging.INFO]
    assert line.levelno == logging.WARNING and line.exc_info is None


async def test_a_call_without_a_message_is_refused() -> None:
    """A client that half-closes at once gets the name of the missing message."""
    async with calling(RequestReader(MESSAGE_BYTES_MAX), CHECK) as stream:
        await stream.send_data(b"", end=True)
        await stream.ended()
        assert stream.status == INVALID_ARGUMENT and "missing" in stream.message


async def test_too_many_unread_calls_are_refused_at_once() -> None:
    """A connection with more than its share is refused. Its earlier calls and other connections are served."""
    request_reader = RequestReader(MESSAGE_BYTES_MAX, calls_max=6, timeout_s=60)
    async with serving(request_reader) as address, RawConnection.connect(address) as connection:
        *waiting, refused = [connection.call(CHECK) for _ in range(4)]
        await refused.ended()
        assert refused.status == RESOURCE_EXHAUSTED and "3 of them of one caller" in refused.message
        async with grpc.aio.insecure_channel(address) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        for stream in waiting:
            await stream.send_message(b"")
            await stream.ended()
            assert stream.status == 0


async def test_incomplete_messages_are_evicted_for_complete_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that wait behind endless messages are read. An endless message is refused with a retry delay."""
    monkeypatch.setattr(module, "BODY_BYTES_MAX", 4 * MESSAGE_BYTES_MAX)
    request_reader = RequestReader(MESSAGE_BYTES_MAX, timeout_s=60)
    assert request_reader.unread.readers_max == 4
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving(request_reader))
        connection = await stack.enter_async_context(RawConnection.connect(address))
        endless = [connection.call(CHECK) for _ in range(4)]
        for stream in endless:
            await stream.send_data(framed(b"\x0a", length=1 << 20))
        async with patience(5):
            while len(request_reader.unread.reading) < 4:
                await asyncio.sleep(0)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        stub = health_pb2_grpc.HealthStub(channel)
        answers = await asyncio.gather(*(stub.Check(health_pb2.HealthCheckRequest()) for _ in range(50)))
        assert len(answers) == 50
        evicted = request_reader.unread.evicted_total
        await connection.until(lambda: sum(stream.has_ended for stream in endless) >= evicted)
        cut = [stream for stream in endless if stream.has_ended]
        assert cut and {stream.status for stream in cut} == {RESOURCE_EXHAUSTED}
        assert request_reader.unread.evicted_total == len(cut)


async def test_open_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One connection does not exclude others. A slot is free after its call has ended."""
    monkeypatch.setattr(module, "STREAMS_MAX", 2)
    async with (
        serving(RequestReader(MESSAGE_BYTES_MAX)) as address,
        RawConnection.connect(address) as connection,
    ):

        async def watch() -> RawStream:
            stream = connection.call(WATCH)
            await stream.send_message(b"")
            await stream.until(lambda: bool(stream.messages))
            return stream

        first, second = await watch(), await watch()
        assert not first.has_ended and not second.has_ended
        assert (await watch()).status == RESOURCE_EXHAUSTED
        async with RawConnection.connect(address) as another:
            stream = another.call(WATCH)
            await stream.send_message(b"")
            await stream.until(lambda: bool(stream.messages))
            assert not stream.has_ended
            await first.ended()
            assert (
                first.status == RESOURCE_EXHAUSTED and "was evicted" in first.message and not second.has_ended
            )
        second.reset()
        async with patience(10):
            while (await watch()).has_ended:
                pass


class Refusing(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """A guard that refuses every call."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        def refused(_: Any) -> Any:
            def call(request: Any, context: Any) -> Any:
                raise MeshError("PEER_REFUSED", "not you")

            return call

        return rewrapped(await continuation(handler_call_details), unary=refused, streaming=refused)


@pytest.mark.parametrize("method", METHODS)
async def test_guards_refuse_before_the_message(method: str) -> None:
    """The server waits for no byte of a message from a refused caller."""
    request_reader = RequestReader(MESSAGE_BYTES_MAX, timeout_s=60, calls_max=1)
    async with calling(request_reader, method, (Refusing(),)) as stream:
        await stream.ended()
        assert stream.status == PERMISSION_DENIED


async def test_a_call_evicted_at_its_timeout_is_ended_once() -> None:
    """Both happen in one turn of the loop. The waiting call is read."""
    clock = VirtualClock()
    request_reader = RequestReader(module.BODY_BYTES_MAX // module.READERS_MIN, timeout_s=60, clock=clock)
    loop, faults = asyncio.get_running_loop(), list[Any]()
    loop.set_exception_handler(lambda _, context: faults.append(context))
    calls = [
        asyncio.ensure_future(request_reader.message(asyncio.Event().wait, ("one",)))
        for _ in range(module.READERS_MIN + 1)
    ]
    await asyncio.sleep(0)
    clock.advance(READ_MIN_S)
    request_reader._limits[next(iter(request_reader.unread.reading))].reschedule(loop.time())
    loop.call_soon(request_reader._evict_due)
    (first, *others) = calls
    with pytest.raises(MeshError):
        await first
    assert (
        not faults and not request_reader.unread.waiting and len(request_reader.unread) == module.READERS_MIN
    )
    for call in others:
        call.cancel()
    await asyncio.gather(*others, return_exceptions=True)
