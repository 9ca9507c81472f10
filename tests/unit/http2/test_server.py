"""The batched server as clients of grpcio see it: kinds of methods, statuses, deadlines, cancels, limits, drain."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import grpc
import pytest

from kvmesh.http2.codec import CodecLimits
from kvmesh.http2.h2_codec import H2Codec
from tests.patience import patience, wait_for
from tests.raw_frames import framed
from tests.raw_http2 import RawConnection
from tests.unit.http2.echo import MESSAGE_BYTES_MAX, SERVICE, echoing

UNARY = f"/{SERVICE}/Unary"


def unary(channel: grpc.aio.Channel, method: str = "Unary") -> Any:
    return channel.unary_unary(f"/{SERVICE}/{method}", None, None)


async def failed(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wait_for(call, 10)
    return caught.value


async def test_each_kind_of_method_answers() -> None:
    async with echoing() as (_, _, address), grpc.aio.insecure_channel(address) as channel:
        assert await unary(channel)(b"hello") == b"hello"
        assert await unary(channel)(b"") == b""
        split = channel.unary_stream(f"/{SERVICE}/Split", None, None)(b"abc")
        assert [message async for message in split] == [b"a", b"b", b"c"]
        assert await channel.stream_unary(f"/{SERVICE}/Join", None, None)(iter([b"x", b"y"])) == b"x|y"
        both = channel.stream_stream(f"/{SERVICE}/Both", None, None)(None)
        for message in (b"1", b"2"):
            await both.write(message)
            assert await both.read() == message
        await both.done_writing()
        assert await both.read() is grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it
        assert await both.code() is grpc.StatusCode.OK


async def test_metadata_and_trailers_pass_both_ways() -> None:
    async with echoing() as (_, echo, address), grpc.aio.insecure_channel(address) as channel:
        call = unary(channel)(b"x", metadata=(("k", "v"), ("k", "w"), ("b-bin", b"\0\1")), timeout=60)
        assert await call == b"x"
        trailers: Any = await call.trailing_metadata()
        assert trailers["trailer"] == "t"
        metadata, remaining_s, peer = echo.seen[0]
        assert [pair for pair in metadata if pair[0] in {"k", "b-bin"}] == [
            ("k", "v"),
            ("k", "w"),
            ("b-bin", b"\0\1"),
        ]
        assert "user-agent" in dict(metadata)
        assert not {"te", "content-type", "grpc-timeout"} & set(dict(metadata))
        assert 0 < remaining_s <= 61  # grpcio rounds up
        assert peer.startswith("ipv4:127.0.0.1:")


async def test_statuses_have_their_text_and_their_trailers() -> None:
    async with echoing() as (_, _, address), grpc.aio.insecure_channel(address) as channel:
        error = await failed(unary(channel)(b"abort"))
        assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "nö 100%")
        trailers: Any = error.trailing_metadata()
        assert trailers["details-bin"] == b"\0\xff"
        error = await failed(unary(channel)(b"bug"))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in str(error.details())
        error = await failed(unary(channel, "Nothing")(b""))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_deadline_and_a_cancel_end_the_handler() -> None:
    async with echoing() as (_, echo, address), grpc.aio.insecure_channel(address) as channel:
        error = await failed(unary(channel)(b"hang", timeout=0.05))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await wait_for(echo.cancelled.wait(), 5)
        echo.entered.clear()
        echo.cancelled.clear()
        call = unary(channel)(b"hang")
        await wait_for(echo.entered.wait(), 5)
        call.cancel()
        await wait_for(echo.cancelled.wait(), 5)
        assert echo.running == 0


async def test_a_lost_connection_ends_its_handlers() -> None:
    async with echoing() as (_, echo, address):
        async with RawConnection.connect(address) as connection:
            await connection.call(UNARY).send_message(b"hang")
            await wait_for(echo.entered.wait(), 5)
        await wait_for(echo.cancelled.wait(), 5)


async def test_messages_of_any_allowed_size_pass_and_larger_ones_are_refused() -> None:
    options = (("grpc.max_receive_message_length", -1),)
    async with echoing() as (_, _, address), grpc.aio.insecure_channel(address, options=options) as channel:
        for size in (65_530, 65_531, 65_536, MESSAGE_BYTES_MAX):
            message = bytes(size - 1) + b"x"
            assert await wait_for(unary(channel)(message), 10) == message
        error = await failed(unary(channel)(bytes(MESSAGE_BYTES_MAX + 1)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in str(error.details())
        compressed = unary(channel)(bytes(100_000), compression=grpc.Compression.Gzip)
        assert await wait_for(compressed, 10) == bytes(100_000)


async def test_a_message_that_is_waited_for_gets_no_more_than_the_window() -> None:
    """All of it comes once it is read. The end of the input is no message."""
    size = 300_000
    async with echoing() as (_, echo, address), RawConnection.connect(address) as connection:
        stream = connection.call(f"/{SERVICE}/Waiting")
        sending = asyncio.create_task(stream.send_message(bytes(size)))
        await wait_for(echo.entered.wait(), 5)
        await connection.until(lambda: stream.send_window == 0)
        await connection.ping()
        assert stream.send_window == 0
        echo.allowed.set()
        await wait_for(sending, 5)
        await stream.ended()
        assert (stream.status, echo.seen) == (0, [True, size, False])


async def test_a_thousand_streams_of_one_connection_are_open_at_once() -> None:
    """And one more waits at the client, until one of them ends."""
    async with echoing() as (_, echo, address), grpc.aio.insecure_channel(address) as channel:
        calls = [unary(channel)(b"hang") for _ in range(1_000)]
        while echo.running < 1_000:
            await asyncio.sleep(0)
        late = unary(channel)(b"late")
        calls[0].cancel()
        assert await wait_for(late, 10) == b"late"
        for call in calls:
            call.cancel()
        while echo.running:
            await asyncio.sleep(0)


async def test_a_stream_over_the_limit_is_refused_and_the_others_run_on() -> None:
    async with echoing(streams_max=2) as (_, echo, address), RawConnection.connect(address) as connection:
        streams = [connection.call(UNARY) for _ in range(3)]
        for stream in streams:
            await stream.send_message(b"hang")
        await streams[2].ended()
        assert streams[2].reset_code == 7  # REFUSED_STREAM
        while echo.running < 2:
            await asyncio.sleep(0)


async def test_a_reader_that_stops_holds_its_writer_and_no_other() -> None:
    """The handler waits while the client's window is closed; each byte that the client allows arrives, and no more."""
    async with (
        echoing() as (_, echo, address),
        RawConnection.connect(address, stream_window=50_000) as connection,
    ):
        slow, other = connection.call(f"/{SERVICE}/Large"), connection.call(UNARY)
        await slow.send_message(b"3")
        await slow.until(lambda: slow.byte_count == 50_000)
        await other.send_message(b"quick")
        await other.ended()
        assert other.messages == [b"quick"]
        assert echo.seen[:-1] == []
        assert slow.byte_count == 50_000
        slow.grant(60_000)
        await slow.until(lambda: slow.byte_count == 110_000)
        slow.grant(1_000_000)
        await slow.ended()
        assert [len(message) for message in slow.messages] == [100_000] * 3
        assert slow.status == 0


async def test_a_slow_reader_gets_its_status_once_it_reads() -> None:
    """Also if the handler gave up both the write and the wait for the status."""
    async with (
        echoing() as (_, echo, address),
        RawConnection.connect(address, stream_window=50) as connection,
    ):
        slow = connection.call(f"/{SERVICE}/Unread")
        await slow.send_message(bytes(100))
        await wait_for(echo.cancelled.wait(), 5)
        assert not slow.has_ended
        slow.grant(1_000)
        await slow.ended()
        assert slow.messages == [bytes(100)]
        assert slow.status == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]


async def test_a_drain_lets_calls_end_and_tells_the_client_to_go() -> None:
    async with echoing() as (server, echo, address), RawConnection.connect(address) as connection:
        stream = connection.call(f"/{SERVICE}/Both")
        await stream.send_message(b"a", end=False)
        await stream.until(lambda: stream.messages == [b"a"])
        stopping = asyncio.ensure_future(server.stop(30))
        await connection.until(lambda: connection.goaway is not None)
        await stream.send_message(b"b")
        await stream.ended()
        assert stream.messages == [b"a", b"b"]
        assert stream.status == 0
        await wait_for(stopping, 10)
        await connection.closed()
        assert echo.running == 0


async def test_the_end_of_a_drain_ends_the_calls_with_a_status() -> None:
    async with echoing() as (server, echo, address), grpc.aio.insecure_channel(address) as channel:
        call = unary(channel)(b"hang")
        await wait_for(echo.entered.wait(), 5)
        await wait_for(server.stop(0.01), 10)
        error = await failed(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert echo.running == 0
        assert await server.wait_for_termination() is False


async def test_a_frozen_client_with_an_open_call_is_dropped() -> None:
    async with echoing(keepalive_s=0.2) as (_, echo, address), RawConnection.connect(address) as connection:
        await connection.call(UNARY).send_message(b"hang")
        await wait_for(echo.entered.wait(), 5)
        await connection.until(lambda: connection.frames["PingFrame"] >= 2)
        assert echo.running == 1
        connection.answers = False
        await wait_for(echo.cancelled.wait(), 5)


async def test_connections_over_the_limit_are_closed() -> None:
    async with echoing(connections_max=1) as (_, _, address), RawConnection.connect(address) as connection:
        stream = connection.call(UNARY)
        await stream.send_message(b"x")
        await stream.ended()
        with pytest.raises((OSError, EOFError, AssertionError, TimeoutError)):
            async with RawConnection.connect(address) as refused:
                await wait_for(refused.closed(), 5)
                raise ConnectionError("closed")


async def test_requests_that_are_no_calls_get_a_status_of_their_own() -> None:
    async with echoing() as (_, _, address), RawConnection.connect(address) as connection:
        big = connection.call(UNARY, metadata=[("big", "x" * 9_000)])
        await big.ended()
        assert big.status == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        late = connection.call(UNARY, metadata=[("grpc-timeout", "tomorrow")])
        await late.ended()
        assert late.status == grpc.StatusCode.INTERNAL.value[0]
        assert "grpc-timeout" in late.message
        cut = connection.call(UNARY)
        await cut.send_data(framed(b"abc", length=10), end=True)
        await cut.ended()
        assert cut.status == grpc.StatusCode.INTERNAL.value[0]


async def test_a_closed_connection_leaves_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is idle after a flood collects no garbage for a long time, so all is freed without a collection."""
    made: list[weakref.ref[Any]] = []
    init = H2Codec.__init__

    def noted(codec: H2Codec, limits: CodecLimits, *, is_client: bool) -> None:
        init(codec, limits, is_client=is_client)
        made.extend((weakref.ref(codec), weakref.ref(codec._h2)))

    monkeypatch.setattr(H2Codec, "__init__", noted)
    async with echoing() as (_, _, address):
        gc.collect()
        gc.disable()
        try:
            async with RawConnection.connect(address) as connection:
                stream = connection.call(UNARY)
                await stream.send_message(b"x")
                await stream.ended()
            async with patience(10):
                while any(each() is not None for each in made):
                    await asyncio.sleep(0.001)
        finally:
            gc.enable()
    assert len(made) == 2
