"""One HTTP/2 connection on asyncio, as both ends have it. All output of a turn of the event loop leaves in one write."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

from kvmesh.clock import MonotonicClock
from kvmesh.http2.codec import (
    CONNECTION,
    EVERY,
    Codec,
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
from kvmesh.http2.control_budget import ControlBudget
from kvmesh.http2.input_turns import InputTurns, call_soon
from kvmesh.http2.messages import PREFIX_BYTES
from kvmesh.http2.stream import Stream
from kvmesh.http2.tls import TlsEnd, TlsFault

log = logging.getLogger(__name__)

SLICE_BYTES: Final = 2_048
"""Bytes that the codec takes at once: at most 2 ms for small frames, and 4 ms for requests (measured once, by hand)."""

RECORD_BYTES: Final = 16_384
"""Bytes that TLS takes at once: one record at least."""

OUTPUT_BYTES_MAX: Final = 262_144
"""Output of one turn that is written before the turn ends, so that a full socket stops the writers."""

UNREAD_BYTES_MAX: Final = 1 << 20
"""Control frames for a peer that does not read. Above this size the connection ends. Messages wait elsewhere."""

STOP_WRITING_S: Final = 0.2
"""Time between a status and the RST_STREAM for a peer that still writes. grpc.aio loses a status with a reset behind it."""

LINGER_S: Final = 5.0
"""Longest time that a closed connection waits for the peer to read its last bytes."""

CONNECTION_WINDOW: Final = 4 << 20
"""Flow-control window of a connection, in bytes. It is granted again as bytes arrive: streams bound what waits."""

LAST_STREAM_MAX: Final = 2**31 - 1
"""Number in a GOAWAY that leaves no stream out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Times of a connection, in seconds."""

    keepalive_s: float
    """A silent peer with open streams is pinged after this time, and dropped after twice this time without an answer."""
    handshake_s: float
    """Longest time until the peer acknowledges the settings of this side, with its TLS handshake."""


class Connection(asyncio.BufferedProtocol):
    """One end. Subclasses serve the requests of the peer, or make requests.

    State machine: opening until the peer acknowledged the settings, open, draining after a GOAWAY of either side, lost.
    """

    def __init__(
        self, codec: Codec, limits: ConnectionLimits, tls: TlsEnd | None, turns: InputTurns | None = None
    ) -> None:
        """`turns`: shared by the connections of a server; absent: turns of its own."""
        self._codec = codec
        self._limits = limits
        self.tls = tls
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.streams: dict[int, Stream] = {}
        self._stalled: dict[int, Stream] = {}
        """Streams whose output waits, in the order of their turns."""
        self._is_paused = False
        self._is_flush_due = False
        self._is_pump_due = False
        self._has_every_opened = False
        """True if a setting of the peer changed the windows of all streams since the last pump."""
        self._is_settled = False
        self._turns = turns or InputTurns(MonotonicClock(), call_soon)
        self.is_new = True
        """See Input."""
        self._input: bytes | memoryview | None = None
        """Input that waits for its turn."""
        self._plain: memoryview | None = None
        """Input without its TLS, which waits as well and comes before."""
        self._is_held = False
        """True while the socket is not read, because input waits."""
        self._ungranted = 0
        """Bytes that arrived since the connection's window was granted last."""
        self._budget = ControlBudget(self._loop.time())
        self._sent_messages = 0
        """Messages since the budget was looked at."""
        self._heard_s = self._loop.time()
        self._pinged_s: float | None = None
        self._keepalive: asyncio.TimerHandle | None = None
        self._settling: asyncio.TimerHandle | None = None
        self._lingering: asyncio.TimerHandle | None = None
        self.is_lost = False
        self.is_draining = False
        self.lost_because = ""
        self.peer = ""
        """Name of the peer as gRPC has it, for example "ipv4:127.0.0.1:4711"."""

    # What subclasses do.

    @abstractmethod
    def on_headers(self, event: Headers) -> bool:
        """Take a header block of the peer. Return False if it had no effect, or led to a reset."""

    @abstractmethod
    def on_stream_reset(self, stream: Stream, code: int) -> None:
        """Note that `stream` is about to end by a reset of the peer, or by the loss of the connection (code -1)."""

    def on_gone_away(self, event: GoneAway) -> None:
        """Take a GOAWAY of the peer."""
        self.is_draining = True
        self._close_if_idle()

    def on_open(self) -> None:
        """Take the peer's acknowledgement of the settings."""

    def on_settings(self) -> None:
        """Take new settings of the peer."""

    def on_lost(self, reason: str) -> None:
        """Take the loss of the connection, after `on_stream_reset` for each of its streams."""

    # asyncio.BufferedProtocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self.is_lost:  # it was given up while it was made
            self._transport.abort()
            return
        self.peer = peer_name(transport.get_extra_info("peername"))
        self._settling = self._loop.call_later(self._limits.handshake_s, self._on_unsettled)
        if self.tls is None:
            self._codec.start()
            self.flush_soon()
        else:
            self._receive_tls(b"")

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._turns.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._turns.buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Take the bytes of one read."""
        if self.is_lost:
            return
        self._heard_s, self._pinged_s = self._loop.time(), None
        if self._is_held:
            self._input = b"".join((self._input or b"", data))
            return
        self._input = data
        if not self._turns.ready(self) and not self.is_lost:
            assert self._transport is not None
            self._is_held = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        return False  # the transport closes itself

    def connection_lost(self, error: Exception | None) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
        self._end(str(error) if error else "the peer closed the connection")
        self._codec.close()

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._pump()

    # What streams do.

    @property
    def is_writable(self) -> bool:
        """True while the socket takes output."""
        return not self._is_paused and not self.is_lost

    def sendable(self, stream: int) -> int:
        """Return the bytes that `stream` may send now."""
        return self._codec.sendable(stream) if self.is_writable else 0

    def try_send(self, stream: int, message: bytes) -> bool:
        """Send `message` with its prefix, if the windows have room for all of it, and if it is at most OUTPUT_BYTES_MAX."""
        size = len(message)
        if size > OUTPUT_BYTES_MAX:
            return False  # it goes in pieces: whole it would look like output that the peer does not read
        if self._is_paused or self._codec.sendable(stream) < PREFIX_BYTES + size:
            return False
        self.send(stream, b"\0" + size.to_bytes(4, "big") + message)
        return True

    def send(self, stream: int, data: bytes | memoryview) -> None:
        """Send `data`, which has at most `sendable` bytes."""
        self._codec.send_data(stream, data)
        self._sent_messages += 1
        self.flush_soon()
        self._flush_much()

    def send_headers(self, stream: int, fields: Fields, *, is_end: bool = False) -> None:
        """Send a header block."""
        self._codec.send_headers(stream, fields, is_end=is_end)
        self.flush_soon()

    def half_close(self, stream: int) -> None:
        """Send the end of this side of `stream`."""
        self._codec.half_close(stream)
        self.flush_soon()

    def send_last(self, stream: int, fields: Fields, *, is_reset_too: bool) -> None:
        """Send trailers. `is_reset_too`: the peer has not ended its side, and is told to stop a moment later."""
        self._codec.send_headers(stream, fields, is_end=True)
        if is_reset_too:
            self._loop.call_later(STOP_WRITING_S, self.reset, stream, ErrorCode.NO_ERROR)
        self.flush_soon()
        self._flush_much()

    def reset(self, stream: int, code: ErrorCode) -> None:
        """End `stream`."""
        if not self.is_lost:
            self._codec.reset(stream, code)
            self.flush_soon()

    def grant(self, stream: int, size: int) -> None:
        """Let the peer send `size` further bytes on `stream`."""
        self._codec.grant(stream, size)
        self.flush_soon()

    def stall(self, stream: Stream) -> None:
        """Send the output of `stream` when its turn comes."""
        if self.is_writable:
            self._push(stream)
        if stream.has_output:
            self._wake_pump(stream)

    def forget(self, stream: Stream) -> None:
        """Remove a closed stream."""
        self.streams.pop(stream.number, None)
        self._stalled.pop(stream.number, None)
        self._close_if_idle()

    # The life of the connection.

    def add(self, stream: Stream) -> None:
        """Add an open stream."""
        self.streams[stream.number] = stream
        if self._keepalive is None:
            self._heard_s = self._loop.time()
            self._keepalive = self._loop.call_later(self._limits.keepalive_s, self._keep_alive)

    def go_away(self, last_stream: int, code: ErrorCode = ErrorCode.NO_ERROR, text: str = "") -> None:
        """Tell the peer to open no streams above `last_stream`. The connection closes with its last stream."""
        if self.is_lost:
            return
        self.is_draining = True
        self._codec.go_away(last_stream, code, text)
        self.flush_soon()
        self._close_if_idle()

    def close(self, reason: str) -> None:
        """Send what was promised, and close the connection. Streams that are open end."""
        if self.is_lost or self._transport is None:
            return
        self._flush()
        self._transport.close()
        self._lingering = self._loop.call_later(LINGER_S, self._transport.abort)
        self._end(reason)

    def abort(self, reason: str) -> None:
        """Close the connection without sending what waits."""
        if self.is_lost:
            return
        if self._transport is not None:
            self._transport.abort()
        self._end(reason)

    def ping(self) -> None:
        """Ask the peer for a sign of life."""
        self._codec.ping(bytes(8))
        self.flush_soon()

    def on_pong(self) -> None:
        """Take the answer to a ping."""

    def _end(self, reason: str) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        for timer in (self._keepalive, self._settling):
            if timer is not None:
                timer.cancel()
        self._input = self._plain = None
        self.lost_because = reason
        for stream in list(self.streams.values()):
            self.on_stream_reset(stream, -1)
            stream.on_reset()
        self.on_lost(reason)

    def _close_if_idle(self) -> None:
        if self.is_draining and not self.streams and not self.is_lost:
            # In a turn of its own: trailers of the last stream may just be on their way into the output.
            self._loop.call_soon(self._close_drained)

    def _close_drained(self) -> None:
        if not self.streams:
            self.close("the connection was drained")

    def _on_unsettled(self) -> None:
        self._settling = None
        self.abort(f"the peer did not acknowledge the settings within {self._limits.handshake_s:g} s")

    def _keep_alive(self) -> None:
        """Ping a silent peer with open streams, or drop it."""
        self._keepalive = None
        if self.is_lost or not self.streams:
            return
        now_s, every_s = self._loop.time(), self._limits.keepalive_s
        if self._pinged_s is not None and now_s - self._pinged_s >= 2 * every_s:
            self.abort(f"the peer answered no ping within {2 * every_s:g} s")
            return
        if self._pinged_s is None and now_s - self._heard_s >= every_s:
            self._pinged_s = now_s
            self.ping()
        self._keepalive = self._loop.call_later(every_s, self._keep_alive)

    # Input.

    def _receive_tls(self, data: bytes) -> bytes:
        assert self.tls is not None
        assert self._transport is not None
        was_open = self.tls.is_open
        try:
            plain = self.tls.receive(data)
        except TlsFault as fault:
            self._transport.write(self.tls.take())
            self._codec.take()  # what waits cannot be encrypted any more
            log.debug("TLS failed", extra={"peer": self.peer, "why": str(fault)})
            self.close(f"TLS: {fault}")
            return b""
        answer = self.tls.take()
        if answer:
            self._transport.write(answer)
        if self.tls.is_open and not was_open:
            self._codec.start()
            self.flush_soon()
        return plain

    def take_slice(self) -> bool:
        """See Input."""
        waiting = self._input
        if self._plain is None and waiting is not None:
            if self.tls is None and len(waiting) <= SLICE_BYTES:
                self._input = None
                self._take(bytes(waiting))
                return False
            self._plain, self._input = memoryview(waiting), None
            if self.tls is not None:
                part, self._input = _split(self._plain, RECORD_BYTES)
                data = self._receive_tls(bytes(part))
                self._plain = memoryview(data) if data else None
        if self._plain is not None:
            part, self._plain = _split(self._plain, SLICE_BYTES)
            self._take(bytes(part))
        if self.is_lost:
            self._plain = self._input = None
        return self._plain is not None or self._input is not None

    def on_taken(self) -> None:
        """See Input."""
        if self._is_held and not self.is_lost and self._transport is not None:
            self._is_held = False
            self._transport.resume_reading()

    def _take(self, data: bytes) -> bool:
        """Give one slice to the codec, and take its events. Return False if the connection ended."""
        try:
            events = self._codec.receive(data)
        except ProtocolFault as fault:
            log.debug("protocol fault", extra={"peer": self.peer, "why": str(fault)})
            self.close(f"the peer broke HTTP/2: {fault}")
            return False
        controls = 0
        for event in events:
            controls += self._dispatch(event)
            if self.is_lost:
                return False
        if controls and not self._is_within_budget(controls):
            # No lower number: the client would take its calls for not begun, and repeat them elsewhere.
            self._codec.go_away(
                LAST_STREAM_MAX, ErrorCode.ENHANCE_YOUR_CALM, "too many frames without content"
            )
            log.warning("connection ended: too many frames without content", extra={"peer": self.peer})
            self.close("too many frames without content")
            return False
        if self._codec.waiting_bytes():
            self.flush_soon()
        return True

    def _dispatch(self, event: Event) -> int:
        """Take one event. Return 1 if its frame cost the peer nothing."""
        kind = type(event)
        if kind is Data:
            data = cast("Data", event)
            self._on_data(data)
            return 0 if data.data or data.is_end else 1
        if kind is Headers:
            return 0 if self.on_headers(cast("Headers", event)) else 1
        if kind is WindowOpened:
            self._on_window(cast("WindowOpened", event).stream)
            return 1
        if kind is Reset:
            self._on_reset(cast("Reset", event))
            return 1
        if kind is GoneAway:
            self.on_gone_away(cast("GoneAway", event))
            return 1
        if event is Control.SETTINGS_TAKEN and not self._is_settled:
            self._is_settled = True
            if self._settling is not None:
                self._settling.cancel()
            self.on_open()
            return 0
        if event is Control.SETTINGS:
            self.on_settings()
        elif event is Control.PONG:
            self.on_pong()
        return 1

    def _is_within_budget(self, controls: int) -> bool:
        self._budget.earn(self._sent_messages)
        self._sent_messages = 0
        return self._budget.spend(controls, self._loop.time())

    def _on_data(self, event: Data) -> None:
        self._ungranted += event.credit
        if self._ungranted >= CONNECTION_WINDOW // 4:
            self._codec.grant(CONNECTION, self._ungranted)
            self._ungranted = 0
        stream = self.streams.get(event.stream)
        if stream is None:
            return
        stream.on_data(event.data, event.credit)
        if event.is_end:
            stream.on_peer_end()

    def _on_window(self, number: int) -> None:
        if number == EVERY:
            self._has_every_opened = True
            self._pump_soon()
            self.on_settings()
        elif number == CONNECTION:
            if self._stalled:
                self._pump_soon()
        else:
            stream = self.streams.get(number)
            if stream is not None and stream.has_output:
                self._wake_pump(stream)  # also while the socket is full: nothing else puts it into the line

    def _on_reset(self, event: Reset) -> None:
        stream = self.streams.get(event.stream)
        if stream is not None:
            self.on_stream_reset(stream, event.code)
            stream.on_reset()

    # Output.

    def flush_soon(self) -> None:
        """Write the output at the end of this turn."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush_much(self) -> None:
        """Write much output before the turn ends, so that a full socket holds the rest back."""
        if self._codec.waiting_bytes() > OUTPUT_BYTES_MAX:
            self._flush()

    def _flush(self) -> None:
        self._is_flush_due = False
        transport = self._transport
        if transport is None or self.is_lost:
            return
        data = self._codec.take()
        if not data:
            return
        if self.tls is not None:
            if not self.tls.is_open:
                return
            self.tls.send(data)
            data = self.tls.take()
        transport.write(data)
        if self._is_paused and transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
            self.abort("the peer does not read")

    def _push(self, stream: Stream) -> bool:
        """Send some output of `stream`. Keep it in the line if the rest waits for a turn. Return True if more can go."""
        before = self._codec.sendable(CONNECTION)
        can_go_on = stream.push()
        window = self._codec.sendable(CONNECTION)
        if window < before:
            self._stalled.pop(stream.number, None)  # its next turn is behind the others
        if not stream.has_output:
            self._stalled.pop(stream.number, None)
        elif can_go_on or not self.is_writable or window <= 0:
            self._stalled.setdefault(stream.number, stream)
        else:
            self._stalled.pop(stream.number, None)  # until its own window opens
        return can_go_on

    def _wake_pump(self, stream: Stream) -> None:
        """Put `stream` into the line, and serve the line in this turn."""
        self._stalled.setdefault(stream.number, stream)
        self._pump_soon()

    def _pump_soon(self) -> None:
        if not self._is_pump_due:
            self._is_pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Send what waits on streams, each in its turn, until the windows or the socket are full."""
        self._is_pump_due = False
        if self._has_every_opened:
            self._has_every_opened = False
            for stream in self.streams.values():
                if stream.has_output:
                    self._stalled.setdefault(stream.number, stream)
        can_go_on = True
        while can_go_on and self._stalled:
            can_go_on = False
            for stream in list(self._stalled.values()):
                if not self.is_writable:
                    return
                if stream.has_output and self._push(stream):
                    can_go_on = True


def _split(data: memoryview, size: int) -> tuple[memoryview, memoryview | None]:
    """Return the first `size` bytes, and the rest; None: there is none."""
    return data[:size], data[size:] or None


def peer_name(address: Sequence[object] | str | None) -> str:
    """Return a socket's address as gRPC names a peer."""
    if not address or isinstance(address, str):
        return f"unix:{address or ''}"
    host, port = str(address[0]), address[1]
    if host.startswith("::ffff:") and "." in host:
        host = host.removeprefix("::ffff:")
    if ":" in host:
        return f"ipv6:%5B{host}%5D:{port}"
    return f"ipv4:{host}:{port}"
