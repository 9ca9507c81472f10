"""Clients that break rules or bend them: a typed end, bounded memory, nothing left, and a bystander that is served."""

from __future__ import annotations

import asyncio
import socket
import zlib
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest
from hyperframe.frame import DataFrame, PingFrame, PriorityFrame, SettingsFrame

from kvmesh.http2.codec import WINDOW
from kvmesh.http2.connection import CONNECTION_WINDOW, OUTPUT_BYTES_MAX, SLICE_BYTES, ConnectionLimits
from kvmesh.http2.h2_codec import SWEEP_EVERY
from kvmesh.http2.input_turns import READ_BYTES, InputTurns, call_soon
from kvmesh.http2.stream import Stream
from tests.patience import wait_for
from tests.raw_frames import (
    PREFACE,
    continuation_flood,
    framed,
    headers_frames,
    hpack_bomb,
    literal_block,
    open_headers,
    ping_flood,
    rapid_resets,
    request_block,
    reset_frame,
    settings_flood,
    window_frame,
)
from tests.raw_http2 import RawConnection
from tests.unit.http2.echo import MESSAGE_BYTES_MAX
from tests.unit.http2.siege import BOTH, JOIN, LARGE, UNARY, Siege, besieged, until

ENHANCE_YOUR_CALM = 11
BUDGET = 400
FLOOD = 600
"""Frames of a flood: more than the budget that the test leaves to its connection."""

OPEN = b"".join(one.serialize() for one in headers_frames(1, request_block(BOTH)))
RESET = reset_frame(1).serialize()
NO_CALL = literal_block([(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/")])
BROKEN = literal_block([(b":method", b"POST"), (b":path", b"/")])


def after(start: bytes, frame: bytes) -> Iterator[bytes]:
    """Return `start`, and a flood of `frame`."""
    yield start
    for _ in range(FLOOD):
        yield frame


def resets_by_the_server() -> Iterator[bytes]:
    """Return calls that the server resets, because their windows overflow (CVE-2025-8671)."""
    block = request_block(BOTH)
    for stream in range(1, 2 * FLOOD, 2):
        opening = headers_frames(stream, block)
        yield b"".join(one.serialize() for one in (*opening, window_frame(stream, 2**31 - 1)))


FLOODS = {
    "PING": ping_flood(FLOOD),
    "SETTINGS": settings_flood(FLOOD),
    "empty DATA": after(OPEN, DataFrame(1, b"").serialize()),
    "padding": after(OPEN, DataFrame(1, b"", pad_length=1, flags=["PADDED"]).serialize()),
    "PRIORITY": after(b"", PriorityFrame(1, depends_on=3).serialize()),
    "unknown frames": after(b"", b"\0\0\0\x40\0\0\0\0\0"),
    "window of the connection": after(OPEN, window_frame(0, 1).serialize()),
    "window of a stream": after(OPEN, window_frame(1, 1).serialize()),
    "window of a closed stream": after(OPEN + RESET, window_frame(1, 1).serialize()),
    "DATA on a closed stream": after(OPEN + RESET, DataFrame(1, b"").serialize()),
    "HEADERS on a closed stream": after(OPEN + RESET, OPEN),
    "RST_STREAM on a closed stream": after(OPEN, RESET),
    "rapid reset": rapid_resets(request_block(BOTH), FLOOD),
    "resets by the server": resets_by_the_server(),
    "refused streams": open_headers(request_block(BOTH), FLOOD),
    "malformed requests": open_headers(BROKEN, FLOOD),
    "CONTINUATION": continuation_flood(request_block(BOTH), FLOOD, b""),
    "one block of 1 MB": iter(
        [
            b"".join(
                one.serialize() for one in headers_frames(1, request_block(BOTH, [("a", "x" * 1_000_000)]))
            )
        ]
    ),
    "HPACK bomb": iter(
        [b"".join(one.serialize() for one in headers_frames(1, request_block(BOTH) + hpack_bomb(100)))]
    ),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
async def test_a_flood_ends_its_connection_by_goaway(flood: Iterator[bytes]) -> None:
    async with besieged(streams_max=10) as siege:
        siege.target._budget._left = BUDGET
        await siege.attacker.flood(flood, batch=500)
        with suppress(ConnectionError):
            await siege.attacker.closed()
        goaway = siege.attacker.goaway
        assert goaway is not None
        assert goaway.error_code in (ENHANCE_YOUR_CALM, 1)
        assert siege.output_bytes < OUTPUT_BYTES_MAX


async def test_calls_of_a_flooding_client_are_not_told_to_be_repeated() -> None:
    async with besieged() as siege:
        siege.target._budget._left = BUDGET
        stream = siege.attacker.call(UNARY)
        await siege.attacker.flood(ping_flood(FLOOD))
        with suppress(ConnectionError):
            await siege.attacker.closed()
        assert siege.attacker.goaway is not None
        assert siege.attacker.goaway.last_stream_id >= stream.number


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\0\1", PREFACE[:10] + b"x" * 20, b"\0" * 24],
    ids=["HTTP/1.1", "TLS", "half a preface", "zeros"],
)
async def test_what_is_no_preface_is_closed(data: bytes) -> None:
    async with besieged() as siege:
        host, _, port = siege.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        await wait_for(reader.read(), 5)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


@pytest.mark.parametrize("data", [b"", PREFACE[:10], PREFACE])
async def test_a_client_that_does_not_take_the_settings_is_dropped(data: bytes) -> None:
    async with besieged() as siege:
        times = ConnectionLimits(keepalive_s=60.0, handshake_s=0.01)
        siege.server._limits = replace(siege.server._limits, connections=times)
        host, _, port = siege.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        with suppress(ConnectionError):
            await wait_for(reader.read(), 5)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        await until(lambda: len(siege.server._connections) == 2)


async def test_a_large_hpack_table_of_the_client_is_not_used() -> None:
    async with besieged(settings={SettingsFrame.HEADER_TABLE_SIZE: 2**32 - 1}) as siege:
        for number in range(150):
            stream = siege.attacker.call(UNARY, [("grpc-encoding", f"unknown-{number:060}")])
            await stream.ended()
            assert stream.status == grpc.StatusCode.UNIMPLEMENTED.value[0]
        codec: Any = siege.target._codec
        assert codec._h2.encoder.header_table._current_size <= 4_096


async def test_streams_that_the_client_resets_leave_no_state() -> None:
    async with besieged() as siege:
        await siege.attacker.flood(rapid_resets(request_block(BOTH), 3 * SWEEP_EVERY))
        await siege.attacker.ping()
        codec: Any = siege.target._codec
        assert len(codec._h2.streams) <= 2 * SWEEP_EVERY


@pytest.mark.parametrize("refused", [NO_CALL, request_block("/no/Such"), BROKEN])
async def test_a_refused_request_that_is_reset_or_ended_at_once_harms_no_other(refused: bytes) -> None:
    async with besieged() as siege:
        other = siege.attacker.call(BOTH)
        for last in (
            [reset_frame(3)],
            headers_frames(5, literal_block([(b":method", b"POST")]), end_stream=True),
        ):
            number = last[0].stream_id
            siege.attacker.open()
            siege.attacker.send(*headers_frames(number, refused), *last)
        await siege.attacker.ping()
        await other.send_message(b"x")
        await other.ended()
        assert other.messages == [b"x"]


async def test_a_window_and_a_reset_in_one_segment_harm_no_other_stream() -> None:
    async with besieged(stream_window=0) as siege:
        stream = siege.attacker.call(UNARY)
        await stream.send_message(b"abc")
        await siege.attacker.ping()
        await until(lambda: any(each.has_output for each in siege.target.streams.values()))
        siege.attacker.send(window_frame(stream.number, 100), reset_frame(stream.number))
        await siege.attacker.ping()
        assert not siege.target.streams


def accounted(siege: Siege) -> int:
    """Return the connection's window: what the client may send, and what it will be granted."""
    codec: Any = siege.target._codec
    manager = codec._h2._inbound_flow_control_window_manager
    return int(manager.current_window_size + manager._bytes_processed + siege.target._ungranted)


async def test_padding_and_late_data_are_given_back_to_the_connection() -> None:
    async with besieged() as siege:
        padded = DataFrame(1, b"", pad_length=255, flags=["PADDED"])
        stream = siege.attacker.call(BOTH)
        siege.attacker.send(*([padded] * 200))
        stream.reset()
        siege.attacker.send(DataFrame(1, bytes(5_000)))
        refused = siege.attacker.call("/no/Such")
        siege.attacker.send(DataFrame(refused.number, bytes(5_000)))
        await refused.ended()
        assert accounted(siege) == CONNECTION_WINDOW


async def test_a_padded_body_flows_on() -> None:
    async with besieged() as siege:
        stream = siege.attacker.call(BOTH)
        piece = DataFrame(1, framed(b"y"), pad_length=255, flags=["PADDED"])
        for _ in range(6):
            wanted = len(stream.messages) + 100
            siege.attacker.send(*([piece] * 100))
            await stream.until(partial(lambda count: len(stream.messages) == count, wanted))
        assert not stream.has_ended


@pytest.mark.parametrize(
    ("fields", "body", "code", "text"),
    [
        ([], framed(b"x", flag=2), grpc.StatusCode.INTERNAL, "compression flag 2"),
        ([], framed(b"x", flag=1), grpc.StatusCode.INTERNAL, "names no compression"),
        ([], framed(b"x", length=5), grpc.StatusCode.INTERNAL, "cut off"),
        ([], b"\0\0", grpc.StatusCode.INTERNAL, "cut off"),
        ([], b"", grpc.StatusCode.INTERNAL, "no message"),
        ([], framed(b"", length=1 << 31), grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
        (
            [("grpc-encoding", "gzip")],
            framed(b"junk", flag=1),
            grpc.StatusCode.INTERNAL,
            "cannot be decompressed",
        ),
        (
            [("grpc-encoding", "deflate")],
            framed(zlib.compress(bytes(40 * MESSAGE_BYTES_MAX)), flag=1),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "decompressed",
        ),
        ([("grpc-encoding", "br")], b"", grpc.StatusCode.UNIMPLEMENTED, "grpc-encoding 'br'"),
        ([("grpc-timeout", "1x")], b"", grpc.StatusCode.INTERNAL, "grpc-timeout '1x'"),
        ([("grpc-timeout", "")], b"", grpc.StatusCode.INTERNAL, "grpc-timeout ''"),
        ([("grpc-timeout", "123456789S")], b"", grpc.StatusCode.INTERNAL, "1 to 8 digits"),
        ([("grpc-timeout", "0n")], framed(b"hang"), grpc.StatusCode.DEADLINE_EXCEEDED, ""),
        ([("a", "x" * 9_000)], b"", grpc.StatusCode.RESOURCE_EXHAUSTED, "metadata size"),
    ],
)
async def test_a_bad_call_gets_a_status(
    fields: list[tuple[str, str]], body: bytes, code: grpc.StatusCode, text: str
) -> None:
    async with besieged() as siege:
        stream = siege.attacker.call(UNARY, fields)
        with suppress(ConnectionError):
            await stream.send_data(body, end=True)
        await stream.ended()
        assert (stream.status, text in stream.message) == (code.value[0], True), stream.message


async def test_a_body_without_end_waits_in_the_window_of_its_stream() -> None:
    async with besieged() as siege:
        stream = siege.attacker.call(UNARY)
        await stream.send_message(b"hang", end=False)
        await wait_for(siege.echo.entered.wait(), 5)
        await stream.send_data(bytes(stream.send_window))
        await siege.attacker.ping()
        (held,) = siege.target.streams.values()
        assert len(held.inbox) <= WINDOW
        assert stream.send_window == 0
        siege.attacker.send(DataFrame(stream.number, b"beyond the window"))
        await siege.attacker.closed()
        assert siege.attacker.goaway is not None
        assert siege.attacker.goaway.error_code == 3
        assert siege.echo.running == 0


async def test_a_window_below_zero_holds_its_stream_and_no_other() -> None:
    async with besieged(connection_window=1 << 20) as siege:
        stream = siege.attacker.call(LARGE)
        await stream.send_message(b"2")
        await stream.until(lambda: stream.byte_count == WINDOW)
        siege.attacker.send(SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 0}))
        stream.grant(WINDOW)
        await siege.attacker.ping()
        assert stream.byte_count == WINDOW
        stream.grant(10)
        await stream.until(lambda: stream.byte_count == WINDOW + 10)
        other = siege.attacker.call(UNARY)
        await other.send_message(b"x")
        siege.attacker.send(SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 300_000}))
        await other.ended()
        await stream.ended()
        assert other.messages == [b"x"]
        assert [len(message) for message in stream.messages] == [100_000, 100_000]


async def test_a_client_that_opens_calls_and_never_reads_is_held_in_bounds() -> None:
    async with besieged(stream_window=1 << 30, connection_window=1 << 30) as siege:
        siege.attacker.pause()
        for _ in range(100):
            stream = siege.attacker.call(LARGE)
            siege.attacker.send(DataFrame(stream.number, framed(b"9"), flags=["END_STREAM"]))
        await siege.attacker.drain()
        await until(lambda: len(siege.target.streams) > 80)
        await siege.answered()
        assert siege.target._is_paused
        assert siege.output_bytes < 3 * OUTPUT_BYTES_MAX
        assert len(siege.echo.seen) < 100 * 9


async def test_a_message_larger_than_the_bound_of_unread_output_reaches_a_slow_reader() -> None:
    async def big(_: bytes, __: Any) -> bytes:
        return bytes(5 << 20)

    async with besieged(stream_window=1 << 30, connection_window=1 << 30) as siege:
        siege.server._handlers[b"/test.Echo/Big"] = grpc.unary_unary_rpc_method_handler(big)
        siege.attacker.pause()
        stream = siege.attacker.call("/test.Echo/Big")
        siege.attacker.send(DataFrame(stream.number, framed(b""), flags=["END_STREAM"]))
        await siege.attacker.drain()
        await until(lambda: siege.target._is_paused)
        siege.attacker.send(PingFrame(0, bytes(8)))
        await siege.answered()
        assert not siege.target.is_lost
        assert siege.output_bytes < 3 * OUTPUT_BYTES_MAX
        siege.attacker.resume()
        await stream.ended()
        assert [len(message) for message in stream.messages] == [5 << 20]


async def test_a_window_that_opens_while_the_socket_is_full_wakes_its_stream() -> None:
    async with besieged(connection_window=1 << 30) as siege:
        waiting = siege.attacker.call(LARGE)
        await waiting.send_message(b"2")
        await waiting.until(lambda: waiting.byte_count == WINDOW)
        siege.attacker.pause()
        filling = siege.attacker.call(LARGE)
        filling.grant(1 << 24)
        siege.attacker.send(DataFrame(filling.number, framed(b"90"), flags=["END_STREAM"]))
        await until(lambda: siege.target._is_paused)
        waiting.grant(200_000)
        await until(lambda: siege.target._codec.sendable(waiting.number) > 0)
        siege.attacker.resume()
        await waiting.ended()
        assert [len(message) for message in waiting.messages] == [100_000, 100_000]
        await filling.ended()


async def test_trailers_of_many_calls_in_one_turn_wait_for_a_slow_reader() -> None:
    ending = asyncio.Event()

    async def end(_: bytes, context: Any) -> None:
        await ending.wait()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "x" * 15_000)

    async with besieged() as siege:
        siege.server._handlers[b"/test.Echo/End"] = grpc.unary_unary_rpc_method_handler(end)
        transport: Any = siege.target._transport
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        streams = [siege.attacker.call("/test.Echo/End") for _ in range(400)]
        for stream in streams:
            await stream.send_message(b"")
        await siege.attacker.ping()
        siege.attacker.pause()
        ending.set()
        await until(lambda: siege.target._is_paused or siege.target.is_lost)
        assert siege.output_bytes < 3 * OUTPUT_BYTES_MAX
        siege.attacker.resume()
        for stream in streams:
            await stream.ended()
        assert {stream.status for stream in streams} == {grpc.StatusCode.UNAVAILABLE.value[0]}


async def test_small_grants_wake_the_streams_once_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    pushes = 0
    push = Stream.push

    def counted(stream: Stream) -> bool:
        nonlocal pushes
        pushes += 1
        return push(stream)

    async with besieged(stream_window=1 << 30) as siege:
        count = 50
        for _ in range(count):
            await siege.attacker.call(LARGE).send_message(b"1")
        await until(lambda: len(siege.target._stalled) == count)
        monkeypatch.setattr(Stream, "push", counted)
        siege.attacker.send(*(window_frame(0, 1) for _ in range(500)))
        await siege.attacker.ping()
        assert 0 < pushes < 20 * count


async def test_stalled_streams_share_the_window_of_the_connection() -> None:
    async with besieged(stream_window=1 << 30) as siege:
        streams = [siege.attacker.call(LARGE) for _ in range(4)]
        for stream in streams:
            await stream.send_message(b"1")
        await until(lambda: len(siege.target._stalled) == 4)
        await siege.attacker.ping()
        begun = [stream.byte_count for stream in streams]
        for _ in range(8):
            siege.attacker.grant(1_000)
            await siege.attacker.ping()
        got = [stream.byte_count - before for stream, before in zip(streams, begun, strict=True)]
        assert got == [2_000] * 4


async def test_settings_at_once_are_few() -> None:
    async with besieged() as siege:
        change = SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 70_000}).serialize()
        siege.attacker.send(change * 20)
        await siege.attacker.ping()
        siege.attacker.send(change * 100)
        await siege.attacker.closed()
        assert siege.attacker.goaway is not None
        assert siege.attacker.goaway.error_code == ENHANCE_YOUR_CALM


class SliceClock:
    """A clock by which each slice of input takes 1 ms."""

    def __init__(self) -> None:
        self.readings = 0

    def now_s(self) -> float:
        self.readings += 1
        return self.readings / 1000


async def test_floods_of_twenty_connections_take_a_turn_together() -> None:
    """A call of another connection ends while most input of the floods waits. Nothing of it is lost."""
    async with besieged() as siege, AsyncExitStack() as stack:
        clock = SliceClock()
        siege.server._turns = InputTurns(clock, call_soon)

        async def connected() -> RawConnection:
            made = await stack.enter_async_context(RawConnection.connect(siege.address))
            await made.ping()
            return made

        bystander, attackers = await connected(), [await connected() for _ in range(20)]
        message = framed(bytes(4_000))
        flood = b"".join(DataFrame(1, bytes([byte])).serialize() for byte in message)
        streams = [attacker.call(JOIN) for attacker in attackers]
        for attacker in attackers:
            attacker.send(flood, DataFrame(1, b"", flags=["END_STREAM"]))
        await until(lambda: sum(each._is_held for each in siege.server._connections) == len(attackers))
        before = clock.readings
        stream = bystander.call(UNARY)
        await stream.send_message(b"x")
        await stream.ended()
        slices = (clock.readings - before) // 2
        assert 0 < slices < 0.25 * len(flood) / SLICE_BYTES * len(attackers)
        for stream in streams:
            await stream.ended()
            assert stream.messages == [bytes(4_000)]


async def test_input_that_waits_for_its_turn_holds_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends faster than its turns come is not read meanwhile: one read of it waits at most."""
    async with besieged(connection_window=4 << 20) as siege:
        siege.target._turns = InputTurns(SliceClock(), call_soon)
        received: list[int] = []
        take_data = siege.target.data_received

        def data_received(data: bytes) -> None:
            received.append(len(data))
            assert len(data) <= READ_BYTES
            assert not siege.target._is_held, "the socket is read while input waits"
            take_data(data)

        monkeypatch.setattr(siege.target, "data_received", data_received)
        streams = [siege.attacker.call(JOIN) for _ in range(30)]
        for stream in streams:
            await stream.send_message(bytes(50_000))
        for stream in streams:
            await stream.ended()
            assert stream.messages == [bytes(50_000)]
        assert len(received) > 3 and sum(received) > 30 * 50_000


async def test_input_that_comes_while_the_socket_is_held_stays_in_order() -> None:
    """A transport may have read more before it was told to pause."""
    async with besieged() as siege:
        siege.target._turns = InputTurns(SliceClock(), call_soon)
        stream = siege.attacker.call(JOIN)
        await siege.attacker.ping()
        message = framed(bytes(range(256)) * 40)
        siege.target.data_received(DataFrame(stream.number, message).serialize())
        assert siege.target._is_held
        siege.target.data_received(DataFrame(stream.number, b"", flags=["END_STREAM"]).serialize())
        await stream.ended()
        assert stream.messages == [bytes(range(256)) * 40]


async def test_idle_connections_are_counted_and_others_are_served() -> None:
    async with besieged() as siege:
        host, _, port = siege.address.rpartition(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(90)]
        await until(lambda: len(siege.server._connections) == 92)
        await siege.answered()
        for _, writer in idle:
            writer.transport.abort()
        await until(lambda: len(siege.server._connections) == 2)


async def test_a_closed_connection_counts_until_its_last_bytes_are_gone() -> None:
    async with besieged(stream_window=1 << 30, connection_window=1 << 30) as siege:
        siege.attacker.pause()
        for _ in range(30):
            stream = siege.attacker.call(LARGE)
            siege.attacker.send(DataFrame(stream.number, framed(b"9"), flags=["END_STREAM"]))
        await siege.attacker.drain()
        await until(lambda: siege.target._is_paused)
        siege.attacker.send(window_frame(0, 2**31 - 1))
        await until(lambda: siege.target.is_lost)
        assert len(siege.server._connections) == 2


async def test_a_drain_serves_a_call_that_was_on_its_way() -> None:
    async with besieged() as siege:
        siege.attacker.answers = False
        stopping = asyncio.create_task(siege.server.stop(20))
        await siege.attacker.until(lambda: siege.attacker.goaway is not None)
        stream = siege.attacker.call(UNARY)
        await stream.send_message(b"late")
        await stream.ended()
        assert stream.messages == [b"late"]
        siege.attacker.send(PingFrame(0, bytes(8), flags=["ACK"]))
        with suppress(ConnectionError):
            await siege.attacker.closed()
        await siege.server.stop(0)
        await wait_for(stopping, 5)


@pytest.mark.parametrize("graces", [(5, None), (None, 5), (0, 0)])
async def test_two_stops_at_once_both_end(graces: tuple[float | None, float | None]) -> None:
    async with besieged() as siege:
        stream = siege.attacker.call(UNARY)
        await stream.send_message(b"hang")
        await wait_for(siege.echo.entered.wait(), 5)
        await wait_for(asyncio.gather(*(siege.server.stop(grace) for grace in graces)), 5)
        assert siege.echo.running == 0
