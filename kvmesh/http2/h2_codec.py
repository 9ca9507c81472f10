"""The codec on h2, the HTTP/2 library of hyper (docs/decisions/0052).

h2 keeps the state of streams, the windows, HPACK and the rules of RFC 9113. Four of its ways do not suit a server with
long streams, and are replaced here:

- It counts open streams by a walk over all of them at each new one. `_H2` counts nothing, because the connection does.
- It ends a connection at the first GOAWAY. gRPC drains: streams run on after a GOAWAY, in both directions.
- It checks the length of a frame, up to 16 MiB, once all of it is there. `_Frames` checks its header.
- A DATA frame takes it some 8 us. `send_data` packs the frame itself, and keeps h2's windows up to date.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    InformationalResponseReceived,
    PingAckReceived,
    PingReceived,
    PriorityUpdated,
    RemoteSettingsChanged,
    RequestReceived,
    ResponseReceived,
    SettingsAcknowledged,
    StreamReset,
    TrailersReceived,
    UnknownFrameReceived,
    WindowUpdated,
)
from h2.events import Event as H2Event
from h2.exceptions import (
    DenialOfServiceError,
    H2Error,
    NoSuchStreamError,
    ProtocolError,
    StreamClosedError,
)
from h2.frame_buffer import FrameBuffer
from h2.settings import SettingCodes, Settings
from hyperframe.frame import Frame, GoAwayFrame, SettingsFrame

from kvmesh.http2.codec import (
    CONNECTION,
    EVERY,
    WINDOW,
    CodecLimits,
    Control,
    Data,
    ErrorCode,
    Event,
    Fields,
    GoneAway,
    Headers,
    ProtocolFault,
    Reset,
    WindowOpened,
)

FRAME_BYTES_MAX: Final = 16_384
"""Largest payload of a frame that a peer must take, and the one that this side allows (RFC 9113, 4.2)."""

HEADER_LIST_BYTES_MAX: Final = 65_536
"""Header lists above this size end the connection. Smaller ones over the advertised limit end their stream only."""

SWEEP_EVERY: Final = 256
"""Closed streams after which h2's table of streams is swept."""

HEADER_TABLE_BYTES_MAX: Final = 4_096
"""Largest HPACK table of this side's header blocks (RFC 9113, 6.5.2). The peer may ask for 4 GiB."""

SETTINGS_MAX: Final = 32
"""SETTINGS frames that are taken at once: each may move the windows of a thousand streams."""

FRAME: Final = struct.Struct(">BHBBI")
"""Header of a frame: high byte and low bytes of the length, type, flags, stream (RFC 9113, 4.1)."""

_DATA: Final = 0


class _GoneAwayReceived(H2Event):
    def __init__(self, last_stream: int, code: int) -> None:
        self.last_stream, self.code = last_stream, code


class _NothingReceived(H2Event):
    """A frame without an effect, for example one on a closed stream."""


class _Frames(FrameBuffer):
    """Input that refuses a frame above the limit by its header. h2 waits for all of it first, up to 16 MiB."""

    def __next__(self) -> Frame:
        if len(self._data) >= FRAME.size:
            self._validate_frame_length(int.from_bytes(self._data[:3], "big"))
        return super().__next__()


class _H2(H2Connection):
    """An h2 connection that neither counts open streams nor ends at a GOAWAY."""

    MAX_CLOSED_STREAMS = 4_096
    """Closed streams that are remembered, to tell late frames from errors. h2's own 65,536 take 6 MB per connection."""

    @property
    def open_inbound_streams(self) -> int:
        return 0

    @property
    def open_outbound_streams(self) -> int:
        return 0

    settings_left = SETTINGS_MAX

    def sweep(self) -> None:
        """Forget closed streams, as h2 itself does where it counts open ones."""
        self._open_streams(0)

    def is_new(self, stream: int) -> bool:
        """Return True if this side may still open `stream`."""
        return self.config.client_side and stream > self.highest_outbound_stream_id

    def _receive_frame(self, frame: Frame) -> list[H2Event]:
        # h2 answers most frames on closed streams with RST_STREAM and tells nobody, so that they would be free.
        return super()._receive_frame(frame) or [_NothingReceived()]

    def _receive_settings_frame(self, frame: SettingsFrame) -> tuple[list[Frame], list[H2Event]]:
        self.settings_left -= 1
        if self.settings_left < 0:
            raise DenialOfServiceError(f"more than {SETTINGS_MAX} SETTINGS frames at once")
        table = frame.settings.get(SettingCodes.HEADER_TABLE_SIZE, 0)
        if table > HEADER_TABLE_BYTES_MAX:
            frame.settings[SettingCodes.HEADER_TABLE_SIZE] = HEADER_TABLE_BYTES_MAX
        return super()._receive_settings_frame(frame)

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Any], list[H2Event]]:
        return [], [_GoneAwayReceived(frame.last_stream_id, frame.error_code)]


class H2Codec:
    """A Codec on h2."""

    def __init__(self, limits: CodecLimits, *, is_client: bool) -> None:
        self._limits = limits
        self._h2 = _H2(
            H2Configuration(
                client_side=is_client,
                header_encoding=None,
                # It would end the connection for a field that gRPC takes, for example one with a space at its end.
                validate_inbound_headers=False,
                normalize_inbound_headers=False,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
                split_outbound_cookies=False,
            )
        )
        settings = {
            SettingCodes.MAX_CONCURRENT_STREAMS: limits.streams_max,
            SettingCodes.INITIAL_WINDOW_SIZE: WINDOW,
            SettingCodes.MAX_FRAME_SIZE: FRAME_BYTES_MAX,
            SettingCodes.MAX_HEADER_LIST_SIZE: limits.header_bytes_max,
        }
        if is_client:
            settings[SettingCodes.ENABLE_PUSH] = 0
        self._h2.incoming_buffer = _Frames(server=not is_client)
        self._h2.local_settings = Settings(client=is_client, initial_values=settings)
        self._h2.decoder.max_header_list_size = HEADER_LIST_BYTES_MAX
        self._closed = 0

    def start(self) -> None:
        self._h2.initiate_connection()
        if self._limits.connection_window > WINDOW:
            self._h2.increment_flow_control_window(self._limits.connection_window - WINDOW)

    def receive(self, data: bytes) -> Sequence[Event]:
        self._h2.settings_left = SETTINGS_MAX
        try:
            return self._received(data)
        except ProtocolError as error:
            code = int(getattr(error, "error_code", ErrorCodes.PROTOCOL_ERROR))
            raise ProtocolFault(code, str(error) or type(error).__name__) from None
        except (H2Error, ValueError, KeyError, IndexError) as error:
            # h2 leaves some errors of hyperframe and hpack untranslated. They are the peer's in any case.
            self.go_away(self._h2.highest_inbound_stream_id, ErrorCode.PROTOCOL_ERROR)
            raise ProtocolFault(ErrorCode.PROTOCOL_ERROR, f"{type(error).__name__}: {error}") from None

    def _received(self, data: bytes) -> Sequence[Event]:
        """Take bytes of the peer. Raises h2's errors."""
        events = (self._translated(each) for each in self._h2.receive_data(data))
        return [each for each in events if each is not None]

    def _translated(self, received: H2Event) -> Event | None:
        if type(received) is StreamReset:
            self._note_closed()
        translate = _TRANSLATIONS.get(type(received))
        return translate(received) if translate is not None else None

    def new_stream(self) -> int:
        return self._h2.get_next_available_stream_id()

    def streams_allowed(self) -> int:
        return int(self._h2.remote_settings.max_concurrent_streams)

    def send_headers(self, stream: int, fields: Fields, *, is_end: bool) -> None:
        if self._is_over(stream):
            return
        self._h2.send_headers(stream, fields, end_stream=is_end)
        if is_end:
            self._note_closed()

    def sendable(self, stream: int) -> int:
        found = self._h2.streams.get(stream)
        if found is None:
            return self._h2.outbound_flow_control_window if stream == CONNECTION else 0
        return min(self._h2.outbound_flow_control_window, found.outbound_flow_control_window)

    def send_data(self, stream: int, data: bytes | memoryview) -> None:
        h2, out, size = self._h2, self._h2._data_to_send, len(data)  # noqa: SLF001  # h2 has no way for ready frames
        h2.streams[stream].outbound_flow_control_window -= size
        h2.outbound_flow_control_window -= size
        if size <= FRAME_BYTES_MAX:
            out += FRAME.pack(0, size, _DATA, 0, stream)
            out += data
            return
        view = memoryview(data)
        for at in range(0, size, FRAME_BYTES_MAX):
            part = view[at : at + FRAME_BYTES_MAX]
            out += FRAME.pack(0, len(part), _DATA, 0, stream)
            out += part

    def half_close(self, stream: int) -> None:
        if not self._is_over(stream):
            self._h2.end_stream(stream)
            self._note_closed()  # it closes with the end of the peer, which counts nothing

    def reset(self, stream: int, code: int) -> None:
        if self._is_over(stream):
            return
        self._h2.reset_stream(stream, code)
        self._note_closed()

    def grant(self, stream: int, size: int) -> None:
        try:
            self._h2.increment_flow_control_window(size, None if stream == CONNECTION else stream)
        except (NoSuchStreamError, StreamClosedError):
            return

    def ping(self, payload: bytes) -> None:
        self._h2.ping(payload)

    def go_away(self, last_stream: int, code: int, text: str = "") -> None:
        frame = GoAwayFrame(0, last_stream_id=last_stream, error_code=code, additional_data=text.encode())
        self._h2._data_to_send += frame.serialize()  # noqa: SLF001  # h2's own GOAWAY ends the connection

    def close(self) -> None:
        self._h2._frame_dispatch_table.clear()  # noqa: SLF001  # its bound methods make a cycle with the connection

    def waiting_bytes(self) -> int:
        return len(self._h2._data_to_send)  # noqa: SLF001  # data_to_send would take it

    def take(self) -> bytes:
        return self._h2.data_to_send()

    def _is_over(self, stream: int) -> bool:
        """Return True if `stream` was open once, and is closed: the peer may have ended it in the bytes just taken."""
        found = self._h2.streams.get(stream)
        return found.closed if found is not None else not self._h2.is_new(stream)

    def _note_closed(self) -> None:
        self._closed += 1
        if self._closed >= SWEEP_EVERY:
            self._closed = 0
            self._h2.sweep()


def _headers(event: Any) -> Event:
    return Headers(event.stream_id, event.headers, event.stream_ended is not None)


def _data(event: Any) -> Event:
    ends = event.stream_ended is not None
    return Data(event.stream_id, event.data, event.flow_controlled_length, ends)


def _reset(event: Any) -> Event:
    return Reset(event.stream_id, int(event.error_code))


def _settings(event: Any) -> Event:
    if SettingCodes.INITIAL_WINDOW_SIZE in event.changed_settings:
        return WindowOpened(EVERY)
    return Control.SETTINGS


def _window(event: Any) -> Event:
    return WindowOpened(event.stream_id or CONNECTION)


_TRANSLATIONS: Final[dict[type[H2Event], Callable[[Any], Event]]] = {
    RequestReceived: _headers,
    ResponseReceived: _headers,
    TrailersReceived: _headers,
    InformationalResponseReceived: lambda _: Control.OTHER,
    DataReceived: _data,
    StreamReset: _reset,
    WindowUpdated: _window,
    RemoteSettingsChanged: _settings,
    SettingsAcknowledged: lambda _: Control.SETTINGS_TAKEN,
    PingReceived: lambda _: Control.PING,
    PingAckReceived: lambda _: Control.PONG,
    PriorityUpdated: lambda _: Control.OTHER,
    UnknownFrameReceived: lambda _: Control.OTHER,
    _NothingReceived: lambda _: Control.OTHER,
    _GoneAwayReceived: lambda event: GoneAway(event.last_stream, event.code),
}
"""StreamEnded is no event of its own: it is the `is_end` of the event before."""
