"""The rules of RFC 9113 that h2spec checks, against the server: which breach ends a stream, and which the connection."""

from __future__ import annotations

import struct

import pytest
from hyperframe.frame import Frame

from tests.raw_frames import headers_frames, literal_block, request_block
from tests.unit.http2.siege import BOTH, UNARY, besieged

PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR = 1, 3, 5, 6
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
BLOCK = request_block(BOTH)
FIELDS = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", BOTH.encode()),
    (b":authority", b"mesh"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
)
CANCEL = struct.pack(">I", 8)


def frame(kind: int, stream: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """Return any frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def joined(frames: list[Frame]) -> bytes:
    """Return frames as bytes."""
    return b"".join(one.serialize() for one in frames)


def opening(stream: int = 1, *, end: bool = False) -> bytes:
    """Return the headers of a call."""
    return joined(headers_frames(stream, BLOCK, end_stream=end))


def request(*fields: tuple[bytes, bytes]) -> bytes:
    """Return the headers of a call on stream 1 that the client has ended."""
    return joined(headers_frames(1, literal_block(fields), end_stream=True))


def without(name: bytes) -> tuple[tuple[bytes, bytes], ...]:
    """Return the fields of a call but one."""
    return tuple(field for field in FIELDS if field[0] != name)


FATAL = {
    "4.2 a frame above the limit": (frame(DATA, 1, bytes(16_385)), FRAME_SIZE_ERROR),
    "4.3 a block that is no HPACK": (frame(HEADERS, 1, b"\xff" * 7, 4), PROTOCOL_ERROR),
    "4.3 another frame inside a block": (
        frame(HEADERS, 1, BLOCK) + frame(DATA, 1, b"x"),
        PROTOCOL_ERROR,
    ),
    "5.1 DATA on an idle stream": (frame(DATA, 1, b"x"), PROTOCOL_ERROR),
    "5.1 RST_STREAM on an idle stream": (frame(RST_STREAM, 1, CANCEL), PROTOCOL_ERROR),
    "5.1 WINDOW_UPDATE on an idle stream": (frame(WINDOW_UPDATE, 1, b"\0\0\0\1"), PROTOCOL_ERROR),
    "5.1.1 a stream of the server": (opening(2), PROTOCOL_ERROR),
    "5.1.1 a lower stream": (opening(5) + opening(3), PROTOCOL_ERROR),
    "5.3.1 a stream that depends on itself": (frame(PRIORITY, 1, b"\0\0\0\1\5"), PROTOCOL_ERROR),
    "6.1 DATA on stream 0": (frame(DATA, 0, b"x"), PROTOCOL_ERROR),
    "6.1 more padding than payload": (opening() + frame(DATA, 1, b"\xffabc", 8), PROTOCOL_ERROR),
    "6.2 HEADERS on stream 0": (frame(HEADERS, 0, BLOCK, 4), PROTOCOL_ERROR),
    "6.3 PRIORITY of a wrong length": (frame(PRIORITY, 1, b"\0\0\0\1"), FRAME_SIZE_ERROR),
    "6.4 RST_STREAM on stream 0": (frame(RST_STREAM, 0, CANCEL), PROTOCOL_ERROR),
    "6.4 RST_STREAM of a wrong length": (opening() + frame(RST_STREAM, 1, b"\0\0\0"), FRAME_SIZE_ERROR),
    "6.5 SETTINGS on a stream": (frame(SETTINGS, 1), PROTOCOL_ERROR),
    "6.5 SETTINGS of a wrong length": (frame(SETTINGS, 0, b"\0\0\0"), FRAME_SIZE_ERROR),
    "6.5.2 ENABLE_PUSH 2": (frame(SETTINGS, 0, b"\0\2\0\0\0\2"), PROTOCOL_ERROR),
    "6.5.2 INITIAL_WINDOW_SIZE 2^31": (frame(SETTINGS, 0, b"\0\4\x80\0\0\0"), FLOW_CONTROL_ERROR),
    "6.5.2 MAX_FRAME_SIZE 1": (frame(SETTINGS, 0, b"\0\5\0\0\0\1"), PROTOCOL_ERROR),
    "6.5.2 MAX_FRAME_SIZE 2^24": (frame(SETTINGS, 0, b"\0\5\1\0\0\0"), PROTOCOL_ERROR),
    "6.6 PUSH_PROMISE of a client": (frame(PUSH_PROMISE, 1, b"\0\0\0\2" + BLOCK, 4), PROTOCOL_ERROR),
    "6.7 PING on a stream": (frame(PING, 1, bytes(8)), PROTOCOL_ERROR),
    "6.7 PING of a wrong length": (frame(PING, 0, bytes(7)), FRAME_SIZE_ERROR),
    "6.8 GOAWAY on a stream": (frame(GOAWAY, 1, bytes(8)), PROTOCOL_ERROR),
    "6.9 the connection's window by 0": (frame(WINDOW_UPDATE, 0, bytes(4)), PROTOCOL_ERROR),
    "6.9 a stream's window by 0": (opening() + frame(WINDOW_UPDATE, 1, bytes(4)), PROTOCOL_ERROR),
    "6.9.1 the connection's window above 2^31-1": (
        frame(WINDOW_UPDATE, 0, b"\x7f\xff\xff\xff"),
        FLOW_CONTROL_ERROR,
    ),
    "6.9.2 a setting that moves a stream's window above 2^31-1": (
        opening()
        + frame(WINDOW_UPDATE, 1, struct.pack(">I", 2**31 - 65_536))
        + frame(SETTINGS, 0, b"\0\4\0\1\0\0"),
        FLOW_CONTROL_ERROR,
    ),
    "6.10 CONTINUATION without HEADERS": (frame(CONTINUATION, 1, b"", 4), PROTOCOL_ERROR),
    "8.1 trailers that do not end the stream": (
        opening() + joined(headers_frames(1, literal_block([(b"a", b"b")]))),
        PROTOCOL_ERROR,
    ),
    "8.1.1 a body longer than content-length": (
        joined(headers_frames(1, literal_block([*FIELDS, (b"content-length", b"3")])))
        + frame(DATA, 1, b"body", 1),
        PROTOCOL_ERROR,
    ),
}

RESETS = {
    "5.1 DATA after the end": (opening(end=True) + frame(DATA, 1, b"x"), STREAM_CLOSED),
    "5.1 HEADERS after the end": (opening(end=True) + opening(end=True), STREAM_CLOSED),
    "5.1 DATA after a reset": (
        opening() + frame(RST_STREAM, 1, CANCEL) + frame(DATA, 1, b"x"),
        STREAM_CLOSED,
    ),
    "5.1 HEADERS after a reset": (
        opening() + frame(RST_STREAM, 1, CANCEL) + opening(end=True),
        STREAM_CLOSED,
    ),
    "6.9.1 a stream's window above 2^31-1": (
        opening() + frame(WINDOW_UPDATE, 1, b"\x7f\xff\xff\xff"),
        FLOW_CONTROL_ERROR,
    ),
    "8.2.1 an upper-case name": (request(*FIELDS, (b"X-Up", b"1")), PROTOCOL_ERROR),
    "8.2.1 an empty name": (request(*FIELDS, (b"", b"1")), PROTOCOL_ERROR),
    "8.2.1 NUL in a value": (request(*FIELDS, (b"a", b"b\0c")), PROTOCOL_ERROR),
    "8.2.1 a line end in a value": (request(*FIELDS, (b"a", b"b\r\nc")), PROTOCOL_ERROR),
    "8.2.2 connection": (request(*FIELDS, (b"connection", b"close")), PROTOCOL_ERROR),
    "8.2.2 transfer-encoding": (request(*FIELDS, (b"transfer-encoding", b"chunked")), PROTOCOL_ERROR),
    "8.3 an unknown pseudo-header": (request((b":x", b"y"), *FIELDS), PROTOCOL_ERROR),
    "8.3 :status of a client": (request((b":status", b"200"), *FIELDS), PROTOCOL_ERROR),
    "8.3 a pseudo-header behind others": (request(*without(b":path"), (b":path", b"/a")), PROTOCOL_ERROR),
    "8.3.1 no :method": (request(*without(b":method")), PROTOCOL_ERROR),
    "8.3.1 no :scheme": (request(*without(b":scheme")), PROTOCOL_ERROR),
    "8.3.1 no :path": (request(*without(b":path")), PROTOCOL_ERROR),
    "8.3.1 two of :path": (request((b":path", UNARY.encode()), *FIELDS), PROTOCOL_ERROR),
}

FINE = {
    "4.1 an unknown frame": frame(32, 0, b"x"),
    "4.1 undefined flags": frame(PING, 0, bytes(8), 0xFE),
    "5.1 PRIORITY on an idle stream": frame(PRIORITY, 1, b"\0\0\0\3\5"),
    "6.5.2 an unknown setting": frame(SETTINGS, 0, b"\0\xaa\0\0\0\1"),
    "6.7 an acknowledgement of no PING": frame(PING, 0, bytes(8), 1),
}


@pytest.mark.parametrize(("data", "code"), FATAL.values(), ids=FATAL)
async def test_a_breach_of_the_connection_ends_it_by_goaway(data: bytes, code: int) -> None:
    async with besieged() as siege:
        siege.attacker.send(data)
        await siege.attacker.closed()
        assert siege.attacker.goaway is not None
        assert siege.attacker.goaway.error_code == code


@pytest.mark.parametrize(("data", "code"), RESETS.values(), ids=RESETS)
async def test_a_breach_of_a_stream_ends_it_alone(data: bytes, code: int) -> None:
    async with besieged() as siege:
        stream = siege.attacker.open()
        siege.attacker.send(data)
        await stream.ended()
        assert stream.reset_code == code
        after = siege.attacker.call(UNARY)
        await after.send_message(b"x")
        await after.ended()
        assert after.messages == [b"x"]


@pytest.mark.parametrize("data", FINE.values(), ids=FINE)
async def test_what_an_endpoint_must_ignore(data: bytes) -> None:
    async with besieged() as siege:
        siege.attacker.send(data)
        stream = siege.attacker.call(UNARY)
        await stream.send_message(b"x")
        await stream.ended()
        assert stream.messages == [b"x"]
        assert siege.attacker.goaway is None


async def test_a_request_without_authority_and_with_trailers_is_served() -> None:
    async with besieged() as siege:
        stream = siege.attacker.call("", block=literal_block(without(b":authority")))
        await stream.send_message(b"x", end=False)
        siege.attacker.send(*headers_frames(stream.number, literal_block([(b"a", b"b")]), end_stream=True))
        await stream.ended()
        assert (stream.messages, stream.status) == ([b"x"], 0)
