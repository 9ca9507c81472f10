"""Calls of a link beyond the streams that its peer allows at once: they wait in order, and each of them ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from hyperframe.frame import Frame, GoAwayFrame, HeadersFrame, RstStreamFrame, SettingsFrame

from kvmesh.http2.client import LinkCall
from tests.patience import wait_for
from tests.unit.http2.echo import batched, echoing, stock
from tests.unit.http2.siege import until
from tests.unit.http2.test_link_faults import linked

ALLOWED = 3


@pytest.mark.parametrize("served", [stock, batched])
async def test_calls_beyond_the_limit_wait_and_are_served(served: Any) -> None:
    """None is refused: a call starts when an older one ends. A call that is cancelled while it waits leaves its place."""
    async with served(ALLOWED) as address, linked(address) as (_, start):
        calls = [start() for _ in range(7)]
        echoes = [asyncio.ensure_future(echoed(call)) for call in calls]
        await wait_for(asyncio.gather(*echoes[:ALLOWED]), 10)
        assert not any(echo.done() for echo in echoes[ALLOWED:])
        assert calls[ALLOWED].cancel()
        assert await wait_for(calls[ALLOWED].code(), 10) is grpc.StatusCode.CANCELLED
        with pytest.raises(grpc.aio.UsageError):
            await wait_for(echoes[ALLOWED], 10)
        for number in range(ALLOWED):
            calls[number].cancel()
            await wait_for(echoes[ALLOWED + 1 + number], 10)


async def echoed(call: LinkCall) -> None:
    """Send a message, and wait for its echo."""
    await call.write(b"x")
    assert await call.read() == b"x"


@pytest.mark.parametrize("seed", range(10))
async def test_no_schedule_exceeds_the_limit_or_loses_a_call(seed: int) -> None:
    """Calls come, end and are cancelled at any moment. The server never refuses one, and all others are served."""
    chance = random.Random(seed)
    async with echoing(streams_max=ALLOWED) as (server, _, address), linked(address) as (channel, start):
        calls: list[LinkCall] = []
        cancelled: set[LinkCall] = set()

        async def run(call: LinkCall) -> None:
            with suppress(grpc.aio.UsageError, asyncio.CancelledError):
                await echoed(call)
            call.cancel()

        runs = []
        for _ in range(40):
            calls.append(start())
            runs.append(asyncio.ensure_future(run(calls[-1])))
            for _ in range(chance.choice((0, 0, 1, 5))):
                await asyncio.sleep(0)
            if chance.random() < 0.3:
                cancelled.add(chance.choice(calls))
                for one in cancelled:
                    one.cancel()
        await wait_for(asyncio.gather(*runs), 10)
        assert {await call.code() for call in calls} == {
            grpc.StatusCode.CANCELLED
        }  # no other end: none was refused
        assert channel._connecting is not None
        connection = channel._connecting.result()
        assert not connection._waiting
        assert not connection.streams
        await until(lambda: not any(one.streams for one in server._connections))


def later(settings: dict[int, int]) -> list[Frame]:
    """Return the frames that allow more streams."""
    return [SettingsFrame(0, settings=settings)]


WAITS = {
    "another limit": (later({SettingsFrame.MAX_CONCURRENT_STREAMS: 2}), None),
    "another limit and window": (
        later({SettingsFrame.MAX_CONCURRENT_STREAMS: 2, SettingsFrame.INITIAL_WINDOW_SIZE: 70_000}),
        None,
    ),
    "a reset of the first": ([RstStreamFrame(1, 8)], None),
    "a drain": ([GoAwayFrame(0, last_stream_id=1)], "takes no more calls"),
    "a broken connection": ([HeadersFrame(2, b"", flags=["END_HEADERS"])], "the peer broke HTTP/2"),
}


@pytest.mark.parametrize(("frames", "text"), WAITS.values(), ids=WAITS)
async def test_a_call_that_waits_starts_or_ends(frames: list[Frame], text: str | None) -> None:
    """By new settings, by the end of another call, by a drain, by a loss. A drain lets the older call run on."""
    async with limited() as (address, opened, send), linked(address) as (_, start):
        first, second = start(), start()
        await wait_for(opened.get(), 10)
        send(frames)
        if text is None:
            assert await wait_for(opened.get(), 10) == 3
        else:
            assert await wait_for(second.code(), 10) is grpc.StatusCode.UNAVAILABLE
            assert text in await second.details()
            assert first._status is None or "broke" in text
            third = start()
            assert await wait_for(third.code(), 10) is grpc.StatusCode.UNAVAILABLE
            assert text in await third.details() and opened.empty()


async def test_a_drain_that_refuses_the_older_call_ends_the_one_that_waits() -> None:
    """The peer ignores streams that begin behind its GOAWAY, so none begins in the place of the refused one."""
    async with limited() as (address, opened, send), linked(address) as (_, start):
        first, second = start(), start()
        assert await wait_for(opened.get(), 10) == 1
        send([GoAwayFrame(0, last_stream_id=0)])
        for call in (first, second):
            assert await wait_for(call.code(), 10) is grpc.StatusCode.UNAVAILABLE
        assert opened.empty()


@asynccontextmanager
async def limited() -> AsyncIterator[tuple[str, asyncio.Queue[int], Callable[[list[Frame]], None]]]:
    """Serve one connection with one stream at once. Yield its address, the opened streams, and what sends frames."""
    opened: asyncio.Queue[int] = asyncio.Queue()
    writers: list[asyncio.StreamWriter] = []
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        settings = {SettingsFrame.MAX_CONCURRENT_STREAMS: 1}
        send([SettingsFrame(0, settings=settings), SettingsFrame(0, flags=["ACK"])])
        with suppress(OSError, asyncio.IncompleteReadError):
            await reader.readexactly(24)  # the preface
            while True:
                head = await reader.readexactly(9)
                frame, length = Frame.parse_frame_header(memoryview(head))
                await reader.readexactly(length)
                if isinstance(frame, HeadersFrame):
                    opened.put_nowait(frame.stream_id)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        ended.set()

    def send(frames: list[Frame]) -> None:
        writers[0].write(b"".join(each.serialize() for each in frames))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server:
        yield f"{host}:{port}", opened, send
        await wait_for(ended.wait(), 10)
