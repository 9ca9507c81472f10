"""The codec on h2 with a short way for the frames of a call: DATA, HEADERS, WINDOW_UPDATE and PING that are well-formed.

h2 takes 15 to 20 us for a frame, most of it for objects and log texts that nobody reads. `DirectCodec` reads such a frame
itself and keeps h2's windows and stream states up to date. INVARIANT: a frame that is not well-formed goes to h2 as it
is, and h2 alone says what is wrong. tests/unit/http2/test_codec.py compares both codecs on random frames.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, cast

from h2.connection import ConnectionState
from h2.exceptions import ProtocolError
from h2.stream import StreamInputs, StreamState

from kvmesh.http2.codec import (
    CONNECTION,
    CodecLimits,
    Control,
    Data,
    Event,
    Fields,
    WindowOpened,
)
from kvmesh.http2.h2_codec import FRAME, FRAME_BYTES_MAX, H2Codec

WINDOW_MAX: Final = 2**31 - 1
"""Largest flow-control window (RFC 9113, 6.9.1)."""

_DATA, _HEADERS, _PING, _WINDOW_UPDATE = 0, 1, 6, 8
_END_STREAM: Final = 0x1
_ACK: Final = 0x1
_END_HEADERS: Final = 0x4
_NUMBER: Final = struct.Struct(">I")
_BITS: Final = 0x7FFF_FFFF
"""The bits of a stream's number. The first bit is reserved, and ignored."""

_FLAGS: Final = {_END_HEADERS: frozenset(), _END_HEADERS | _END_STREAM: frozenset(("END_STREAM",))}
_OPEN: Final = (ConnectionState.CLIENT_OPEN, ConnectionState.SERVER_OPEN)
_RECEIVING: Final = (StreamState.OPEN, StreamState.HALF_CLOSED_LOCAL)
_LIVE: Final = (StreamState.OPEN, StreamState.HALF_CLOSED_LOCAL, StreamState.HALF_CLOSED_REMOTE)

_INDEXED_STATUS_200: Final = b"\x88"
"""Field 8 of HPACK's static table (RFC 7541, appendix A)."""


class _HeadersFrame(NamedTuple):
    """What h2 reads of a HEADERS frame."""

    stream_id: int
    data: bytes
    flags: frozenset[str]


class DirectCodec(H2Codec):
    """A Codec on h2 that handles the frequent frames itself."""

    def __init__(self, limits: CodecLimits, *, is_client: bool) -> None:
        super().__init__(limits, is_client=is_client)
        self._is_client = is_client
        self._rest = b""

    def _received(self, data: bytes) -> Sequence[Event]:
        if self._rest:
            data, self._rest = self._rest + data, b""
        events: list[Event] = []
        at, size = 0, len(data)
        buffer = self._h2.incoming_buffer
        while at < size:
            if buffer._data or buffer._preamble_len or buffer._headers_buffer:  # noqa: SLF001  # h2 is in a frame
                events.extend(super()._received(data[at:]))
                break
            if size - at < FRAME.size:
                self._rest = data[at:]
                break
            high, low, kind, flags, number = FRAME.unpack_from(data, at)
            start = at + FRAME.size
            end = start + (high << 16 | low)
            if end - start > FRAME_BYTES_MAX:
                events.extend(super()._received(data[at:]))
                break
            if end > size:
                self._rest = data[at:]
                break
            event = self._direct(kind, flags, number & _BITS, data[start:end])
            if event is not None:
                events.append(event)
            else:
                events.extend(super()._received(data[at:end]))
            at = end
        return events

    def _direct(self, kind: int, flags: int, stream: int, payload: bytes) -> Event | None:
        """Take one frame. Return None, and change nothing, unless it is well-formed and its stream may have it."""
        if self._h2.state_machine.state not in _OPEN:
            return None
        if kind == _DATA:
            return self._take_data(flags, stream, payload)
        if kind == _WINDOW_UPDATE:
            return self._take_window(stream, payload)
        if kind == _HEADERS:
            return self._take_headers(flags, stream, payload)
        if kind == _PING and stream == CONNECTION and len(payload) == 8 and flags in (0, _ACK):
            if flags:
                return Control.PONG
            self._h2._data_to_send += FRAME.pack(0, 8, _PING, _ACK, CONNECTION) + payload  # noqa: SLF001
            return Control.PING
        return None

    def _take_data(self, flags: int, stream: int, payload: bytes) -> Event | None:
        found: Any = self._h2.streams.get(stream)
        if found is None or flags & ~_END_STREAM:
            return None
        size, state = len(payload), found.state_machine
        whole: Any = self._h2._inbound_flow_control_window_manager  # noqa: SLF001
        own = found._inbound_window_manager  # noqa: SLF001
        if (
            state.state not in _RECEIVING
            or not state.headers_received
            or found._expected_content_length is not None  # noqa: SLF001
            or size > whole.current_window_size
            or size > own.current_window_size
        ):
            return None
        whole.current_window_size -= size
        own.current_window_size -= size
        if flags:
            state.process_input(StreamInputs.RECV_END_STREAM)
        return Data(stream, payload, size, bool(flags))

    def _take_window(self, stream: int, payload: bytes) -> Event | None:
        if len(payload) != _NUMBER.size:
            return None
        increment = _NUMBER.unpack(payload)[0]
        target: Any = self._h2 if stream == CONNECTION else self._h2.streams.get(stream)
        if (
            not increment
            or target is None
            or (stream != CONNECTION and target.state_machine.state not in _LIVE)
            or target.outbound_flow_control_window + increment > WINDOW_MAX
        ):
            return None
        target.outbound_flow_control_window += increment
        return WindowOpened(stream)

    def _take_headers(self, flags: int, stream: int, payload: bytes) -> Event | None:
        names = _FLAGS.get(flags)
        if names is None:
            return None
        if self._is_client:
            found: Any = self._h2.streams.get(stream)
            if found is None or found.state_machine.state not in _RECEIVING:
                return None
        elif not stream & 1 or stream <= self._h2.highest_inbound_stream_id:
            return None
        frame = _HeadersFrame(stream, payload, names)
        try:
            _, received = self._h2._receive_headers_frame(cast("Any", frame))  # noqa: SLF001
        except ProtocolError as error:
            self._h2._terminate_connection(error.error_code)  # noqa: SLF001  # as h2 does for a frame of its own
            raise
        return self._translated(received[0])

    def send_headers(self, stream: int, fields: Fields, *, is_end: bool) -> None:
        """Send a header block; that of a response without HPACK's dynamic table, which takes 10 us for a field."""
        found: Any = self._h2.streams.get(stream)
        # After a change of its table's size the encoder has to say so in its next block.
        if (
            self._is_client
            or found is None
            or found.closed
            or self._h2.state_machine.state not in _OPEN
            or self._h2.encoder.table_size_changes
        ):
            super().send_headers(stream, fields, is_end=is_end)
            return
        block = literal_block(fields)
        if len(block) > FRAME_BYTES_MAX:
            super().send_headers(stream, fields, is_end=is_end)
            return
        found.state_machine.process_input(StreamInputs.SEND_HEADERS)
        if is_end:
            found.state_machine.process_input(StreamInputs.SEND_END_STREAM)
            self._note_closed()
        flags = _END_HEADERS | _END_STREAM if is_end else _END_HEADERS
        self._h2._data_to_send += FRAME.pack(0, len(block), _HEADERS, flags, stream) + block  # noqa: SLF001


def literal_block(fields: Fields) -> bytes:
    """Return a header block of literal fields without indexing (RFC 7541, 6.2.2). It suits any state of the peer's
    table.
    """
    parts: list[bytes] = []
    for name, value in fields:
        if name == b":status" and value == b"200":
            parts.append(_INDEXED_STATUS_200)
        else:
            parts += (b"\0", _length(len(name)), name, _length(len(value)), value)
    return b"".join(parts)


def _length(size: int) -> bytes:
    """Return the length of a string without Huffman code: an integer with a prefix of 7 bits (RFC 7541, 5.1)."""
    if size < 127:
        return bytes((size,))
    size -= 127
    made = bytearray(b"\x7f")
    while size >= 128:
        made.append(size & 127 | 128)
        size >>= 7
    made.append(size)
    return bytes(made)
