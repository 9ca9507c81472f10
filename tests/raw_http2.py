"""A gRPC client for tests that speaks raw HTTP/2: byte-sized windows, half bodies, and resets at any time.

No flow-control window grows without a call, and the caller decides how much of a body is sent. Any frame or junk can be
sent between (`send`, with the functions of tests/raw_frames.py). SETTINGS and PING of the peer are answered unless
`answers` is False:

    async with RawConnection.connect("127.0.0.1:50051", stream_window=0) as connection:
        stream = connection.call("/kvmesh.inference.v1.InferenceService/Generate")
        await stream.send_message(request.SerializeToString())
        stream.grant(100)
        await stream.until(lambda: stream.byte_count >= 100)
        stream.reset()
"""

from __future__ import annotations

import asyncio
import base64
import ssl as tls_module
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Final, TypeVar
from urllib.parse import unquote

from hpack import Decoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from tests.patience import patience
from tests.raw_frames import (
    CANCEL,
    PREFACE,
    Metadata,
    data_frames,
    framed,
    headers_frames,
    request_block,
    reset_frame,
    window_frame,
)

WINDOW: Final = 65_535
"""The initial window (RFC 9113, 6.9.2)."""

WINDOW_MAX: Final = 2**31 - 1
WAIT_S: Final = 20.0
"""Default of the longest wait for an expected event, in seconds."""

_READ_BYTES: Final = 1 << 16

MessageT = TypeVar("MessageT")


class RawStream:
    """One call, with its results in the fields.

    `window` is the number of bytes that the peer may still send on it.
    """

    def __init__(self, connection: RawConnection, number: int) -> None:
        self.number = number
        self.headers: dict[str, str] = {}
        """The first headers of the answer, also if the answer consists of trailers only."""
        self.trailers: dict[str, str] = {}
        self.messages: list[bytes] = []
        """Complete gRPC messages, without prefix."""
        self.byte_count = 0
        """Bytes of DATA received, with prefixes: the bytes that left the peer's process for this call."""
        self.reset_code: int | None = None
        """Error code of the peer's RST_STREAM."""
        self.has_ended = False
        """True once the peer sends nothing more on the stream, for any reason."""
        self.window = connection.stream_window
        self.send_window = connection.peer_stream_window
        self._connection = connection
        self.partial = bytearray()
        """The beginning of an incomplete message, with its prefix."""

    @property
    def status(self) -> int | None:
        """grpc-status; None if not received."""
        text = self.trailers.get("grpc-status")
        return None if text is None else int(text)

    @property
    def message(self) -> str:
        """grpc-message."""
        return unquote(self.trailers.get("grpc-message", ""))

    @property
    def details(self) -> bytes:
        """grpc-status-details-bin, a google.rpc.Status; empty if not received."""
        text = self.trailers.get("grpc-status-details-bin", "")
        return base64.b64decode(text + "=" * (-len(text) % 4))

    async def send_message(self, message: bytes, *, end: bool = True) -> None:
        """Send one gRPC message as the peer's windows allow; `end` marks it as the last."""
        await self.send_data(framed(message), end=end)

    async def send_data(self, data: bytes, *, end: bool = False) -> None:
        """Send bytes of the body as the peer's windows allow. Raises ConnectionError if the stream ends first."""
        view = memoryview(data)
        while view:
            await self._connection.until(lambda: self.has_ended or self._sendable() > 0)
            if self.has_ended:
                raise ConnectionError(
                    f"stream {self.number} ended with {self.status}, reset {self.reset_code}"
                )
            part = bytes(view[: self._sendable()])
            view = view[len(part) :]
            self.send_window -= len(part)
            self._connection.send_window -= len(part)
            self._connection.send(*data_frames(self.number, part, end_stream=end and not view))
        if end and not data:
            self._connection.send(*data_frames(self.number, b"", end_stream=True))
        await self._connection.drain()

    def grant(self, increment: int, *, connection: bool = True) -> None:
        """Let the peer send `increment` more bytes on this stream, and as many on the connection."""
        self.window += increment
        self._connection.send(window_frame(self.number, increment))
        if connection:
            self._connection.grant(increment)

    def reset(self, code: int = CANCEL) -> None:
        """Send RST_STREAM."""
        self.has_ended = True
        self._connection.send(reset_frame(self.number, code))
        self._connection.forget(self)

    async def until(self, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        """Wait until `condition`, or the end of the stream. Raises TimeoutError."""
        await self._connection.until(lambda: self.has_ended or condition(), timeout_s)

    async def ended(self, timeout_s: float = WAIT_S) -> None:
        """Wait until the peer sends nothing more on the stream. Raises TimeoutError."""
        await self.until(lambda: False, timeout_s)

    def decoded(self, parse: Callable[[bytes], MessageT]) -> list[MessageT]:
        """Return the messages parsed by `parse`, for example `pb.GenerateResponse.FromString`."""
        return [parse(message) for message in self.messages]

    def _sendable(self) -> int:
        return min(self.send_window, self._connection.send_window)

    def on_headers(self, headers: dict[str, str]) -> None:
        """Take a header block: the first is the head, later ones are trailers.

        A first block with a status is both.
        """
        self.headers = self.headers or headers
        if "grpc-status" in headers:
            self.trailers = headers

    def on_data(self, data: bytes) -> None:
        """Take bytes of the body and split them into messages."""
        self.byte_count += len(data)
        self.window -= len(data)
        self.partial += data
        while len(self.partial) >= 5:
            end = 5 + int.from_bytes(self.partial[1:5], "big")
            if len(self.partial) < end:
                return
            self.messages.append(bytes(self.partial[5:end]))
            del self.partial[:end]


class RawConnection:
    """One HTTP/2 connection; see the module. Made by `connect`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, authority: str, stream_window: int
    ) -> None:
        self.stream_window = stream_window
        """Bytes that the peer may send on a new stream."""
        self.window = WINDOW
        """Bytes that the peer may still send on all streams together."""
        self.peer_stream_window = WINDOW
        self.send_window = WINDOW
        self.peer_settings: dict[int, int] = {}
        self.frames: Counter[str] = Counter()
        """Number of received frames by type: "PingFrame", "RstStreamFrame", ..."""
        self.byte_count = 0
        """Bytes of DATA received, on followed and other streams."""
        self.goaway: GoAwayFrame | None = None
        self.is_closed = False
        """True once the peer has closed the connection."""
        self.answers = True
        """If False, neither SETTINGS nor PING of the peer is answered."""
        self._reader, self._writer = reader, writer
        self._authority = authority
        self._streams: dict[int, RawStream] = {}
        self._next = 1
        self._block = bytearray()
        self._decoder = Decoder()
        self._pongs: set[bytes] = set()
        self._waiters: set[asyncio.Future[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        address: str,
        *,
        stream_window: int = WINDOW,
        connection_window: int = WINDOW,
        settings: Mapping[int, int] | None = None,
        tls: tls_module.SSLContext | None = None,
        server_hostname: str | None = None,
    ) -> AsyncIterator[RawConnection]:
        """Connect to "host:port", send the preface, and close at the end; does not wait for the peer's SETTINGS.

        `stream_window` is the number of bytes that the peer may send on a stream before `grant`, at least 0.
        `connection_window` is the same for all streams together, at least 65,535, the minimum of HTTP/2.
        `settings` are additional SETTINGS by number. `tls` must offer ALPN "h2".
        """
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(
            host, int(port), ssl=tls, server_hostname=server_hostname if tls else None
        )
        made = cls(reader, writer, address, stream_window)
        reading = asyncio.ensure_future(made._read())
        try:
            writer.write(PREFACE)
            first = {SettingsFrame.INITIAL_WINDOW_SIZE: stream_window, **(settings or {})}
            made.send(SettingsFrame(0, first))
            if connection_window > WINDOW:
                made.grant(connection_window - WINDOW)
            yield made
        finally:
            reading.cancel()
            await asyncio.wait((reading,))
            writer.transport.abort()
            with suppress(OSError, tls_module.SSLError):
                await writer.wait_closed()

    def call(
        self,
        path: str,
        metadata: Metadata = (),
        *,
        deadline_s: float | None = None,
        block: bytes | None = None,
    ) -> RawStream:
        """Open a stream with the headers of a gRPC call; the caller sends the body.

        `block` replaces the headers.
        """
        stream = self.open()
        if block is None:
            block = request_block(path, metadata, authority=self._authority, deadline_s=deadline_s)
        self.send(*headers_frames(stream.number, block))
        return stream

    def open(self) -> RawStream:
        """Return the next stream, on which nothing was sent yet."""
        stream = RawStream(self, self._next)
        self._streams[stream.number] = stream
        self._next += 2
        return stream

    def forget(self, stream: RawStream) -> None:
        """Stop following `stream`: its later bytes are counted and dropped."""
        self._streams.pop(stream.number, None)

    def send(self, *frames: Frame | bytes) -> None:
        """Send frames, or any bytes, unchanged, after the bytes not sent yet."""
        self._writer.write(b"".join(one if isinstance(one, bytes) else one.serialize() for one in frames))

    async def drain(self) -> None:
        """Wait until the socket has taken most of the bytes sent."""
        await self._writer.drain()

    async def flood(self, parts: Iterable[bytes], *, batch: int = 64) -> int:
        """Send `parts`, `batch` at a time; return how many were sent before the peer closed the connection."""
        count = 0
        waiting: list[bytes] = []
        with suppress(ConnectionError):
            for part in parts:
                waiting.append(part)
                if len(waiting) == batch:
                    self.send(*waiting)
                    await self.drain()
                    count += len(waiting)
                    waiting = []
                if self.is_closed:
                    return count
            self.send(*waiting)
            await self.drain()
            count += len(waiting)
        return count

    def grant(self, increment: int) -> None:
        """Let the peer send `increment` more bytes on all streams together."""
        self.window += increment
        self.send(window_frame(0, increment))

    def pause(self) -> None:
        """Stop reading from the socket, so that the peer's writes stall in TCP once buffers are full."""
        self._flowing.clear()

    def resume(self) -> None:
        """Read again."""
        self._flowing.set()

    async def ping(self, payload: bytes = b"raw-ping", timeout_s: float = WAIT_S) -> None:
        """Wait for the answer to a ping, so the peer has read all earlier bytes.

        Raises TimeoutError, ConnectionError.
        """
        self._pongs.discard(payload)
        self.send(PingFrame(0, payload))
        await self.until(lambda: payload in self._pongs or self.is_closed, timeout_s)
        if payload not in self._pongs:
            raise ConnectionError("the peer closed the connection before it answered a ping")

    async def until(self, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        """Wait until `condition`, checked after each read of the socket. Raises TimeoutError."""
        async with patience(timeout_s):
            while not condition():
                if self.is_closed:
                    raise ConnectionError(f"the peer closed the connection, goaway {self.goaway}")
                waiter = asyncio.get_running_loop().create_future()
                self._waiters.add(waiter)
                try:
                    await waiter
                finally:
                    self._waiters.discard(waiter)

    async def closed(self, timeout_s: float = WAIT_S) -> None:
        """Wait until the peer closes the connection. Raises TimeoutError."""
        await self.until(lambda: self.is_closed, timeout_s)

    async def _read(self) -> None:
        buffer = bytearray()
        try:
            while True:
                await self._flowing.wait()
                data = await self._reader.read(_READ_BYTES)
                if not data:
                    return
                buffer += data
                self._take_frames(buffer)
                self._wake()
        except (ConnectionError, tls_module.SSLError):
            return
        finally:
            self.is_closed = True
            for stream in self._streams.values():
                stream.has_ended = True
            self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _take_frames(self, buffer: bytearray) -> None:
        at = 0
        while len(buffer) - at >= 9:
            frame, length = Frame.parse_frame_header(memoryview(bytes(buffer[at : at + 9])))
            if len(buffer) - at - 9 < length:
                break
            frame.parse_body(memoryview(bytes(buffer[at + 9 : at + 9 + length])))
            at += 9 + length
            self._take(frame)
        del buffer[:at]

    def _take(self, frame: Frame) -> None:
        self.frames[type(frame).__name__] += 1
        stream = self._streams.get(frame.stream_id)
        match frame:
            case DataFrame():
                self.window -= frame.flow_controlled_length
                self.byte_count += len(frame.data)
                if stream is not None:
                    stream.on_data(frame.data)
            case HeadersFrame() | ContinuationFrame():
                self._block += frame.data
                if "END_HEADERS" in frame.flags:
                    headers = {
                        str(name): str(value) for name, value in self._decoder.decode(bytes(self._block))
                    }
                    self._block.clear()
                    if stream is not None:
                        stream.on_headers(headers)
            case RstStreamFrame() if stream is not None:
                stream.reset_code = frame.error_code
                stream.has_ended = True
            case SettingsFrame():
                self._take_settings(frame)
            case PingFrame() if "ACK" in frame.flags:
                self._pongs.add(frame.opaque_data)
            case PingFrame() if self.answers:
                self.send(PingFrame(0, frame.opaque_data, flags=["ACK"]))
            case WindowUpdateFrame() if frame.stream_id == 0:
                self.send_window += frame.window_increment
            case WindowUpdateFrame() if stream is not None:
                stream.send_window += frame.window_increment
            case GoAwayFrame():
                self.goaway = frame
            case _:
                pass
        if stream is not None and "END_STREAM" in frame.flags:
            stream.has_ended = True
        if stream is not None and stream.has_ended:
            self.forget(stream)

    def _take_settings(self, frame: SettingsFrame) -> None:
        if "ACK" in frame.flags:
            return
        self.peer_settings |= frame.settings
        window = frame.settings.get(SettingsFrame.INITIAL_WINDOW_SIZE)
        if window is not None:
            for stream in self._streams.values():
                stream.send_window += window - self.peer_stream_window
            self.peer_stream_window = window
        if self.answers:
            self.send(SettingsFrame(0, flags=["ACK"]))
