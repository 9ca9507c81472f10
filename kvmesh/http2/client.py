"""The client end of a link between two services: a channel with one connection and bidirectional streams.

It has those methods of grpc.aio.Channel and its calls that the links use, with the same meaning. It does not connect again:
a link opens a new channel.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc

from kvmesh.http2.codec import CodecLimits, ErrorCode, GoneAway, Headers
from kvmesh.http2.connection import CONNECTION_WINDOW, Connection, ConnectionLimits
from kvmesh.http2.direct_codec import DirectCodec
from kvmesh.http2.fields import CONTENT_TYPE, is_grpc, status_of
from kvmesh.http2.messages import MessageReader, WireError
from kvmesh.http2.server_call import EOF
from kvmesh.http2.stream import Stream
from kvmesh.http2.tls import TlsEnd

HEADER_BYTES_MAX: Final = 16_384
"""Largest header list that a client takes, as grpcio's default."""

_RESETS: Final[dict[int, grpc.StatusCode]] = {
    ErrorCode.REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.CANCEL: grpc.StatusCode.CANCELLED,
    ErrorCode.ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""Status of a call by the code of its RST_STREAM; INTERNAL for others (gRPC, PROTOCOL-HTTP2.md)."""

_HTTP_STATUSES: Final = {
    b"400": grpc.StatusCode.INTERNAL,
    b"401": grpc.StatusCode.UNAUTHENTICATED,
    b"403": grpc.StatusCode.PERMISSION_DENIED,
    b"404": grpc.StatusCode.UNIMPLEMENTED,
    b"429": grpc.StatusCode.UNAVAILABLE,
    b"502": grpc.StatusCode.UNAVAILABLE,
    b"503": grpc.StatusCode.UNAVAILABLE,
    b"504": grpc.StatusCode.UNAVAILABLE,
}
"""Status of a call by the HTTP status of an answer without gRPC's; UNKNOWN for others (http-grpc-status-mapping.md)."""


@dataclass(frozen=True, slots=True)
class LinkTls:
    """TLS of a channel. `server_name`: the name that the peer's certificate must have."""

    context: ssl.SSLContext
    server_name: str


class LinkChannel:
    """A channel to `host:port`. The first call opens its connection."""

    def __init__(
        self, address: str, tls: LinkTls | None, *, message_bytes_max: int, limits: ConnectionLimits
    ) -> None:
        self._address = address
        self._tls = tls
        self._message_bytes_max = message_bytes_max
        self._limits = limits
        self._connecting: asyncio.Task[_ClientConnection] | None = None

    def stream_stream(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        _registered_method: bool | None = None,
    ) -> Callable[[], LinkCall]:
        """Return a function that starts a call of `method`. Generated stubs call this."""

        def call() -> LinkCall:
            if self._connecting is None:
                self._connecting = asyncio.create_task(self._connect(), name=f"connect:{self._address}")
            return LinkCall(
                self._connecting, method, self._address, request_serializer, response_deserializer, self._tls
            )

        return call

    async def close(self, _: float | None = None) -> None:
        """End the connection and its calls."""
        self.abort()
        if self._connecting is not None:
            await asyncio.gather(self._connecting, return_exceptions=True)

    def abort(self) -> None:
        """End the connection and its calls, without waiting for it."""
        connecting = self._connecting
        if connecting is None:
            return
        if not connecting.done():
            connecting.cancel()
        elif not connecting.cancelled() and connecting.exception() is None:
            connecting.result().abort("the channel was closed")

    async def _connect(self) -> _ClientConnection:
        """Return the connection. Raises OSError, or ValueError or OverflowError for an address that can be none."""
        host, _, port = self._address.rpartition(":")
        tls = self._tls
        end = TlsEnd(tls.context, is_server=False, server_name=tls.server_name) if tls else None
        connection = _ClientConnection(self._limits, end, self._message_bytes_max)
        loop = asyncio.get_running_loop()
        try:
            # TCP itself repeats a lost SYN for two minutes.
            async with asyncio.timeout(self._limits.handshake_s):
                await loop.create_connection(lambda: connection, host.strip("[]"), int(port))
            await connection.opened()
        except BaseException:
            connection.abort("the channel was closed")
            raise
        return connection


class LinkCall:
    """One bidirectional stream. Its methods are those of grpc.aio.StreamStreamCall."""

    def __init__(
        self,
        connecting: asyncio.Task[_ClientConnection],
        method: str,
        address: str,
        serialize: Callable[[Any], bytes],
        deserialize: Callable[[bytes], Any],
        tls: LinkTls | None,
    ) -> None:
        self._serialize = serialize
        self._deserialize = deserialize
        self._stream: Stream | None = None
        self._connection: _ClientConnection | None = None
        self._status: tuple[grpc.StatusCode, str] | None = None
        self._ended = asyncio.Event()
        self._is_cancelled = False
        self._is_half_closed = False
        self.fields = (
            (b":method", b"POST"),
            (b":scheme", b"https" if tls else b"http"),
            (b":path", method.encode()),
            (b":authority", (tls.server_name if tls else address).encode()),
            (b"content-type", CONTENT_TYPE),
            (b"te", b"trailers"),
        )
        self._starting = asyncio.create_task(self._start(connecting), name=f"call:{method}")

    async def write(self, message: Any) -> None:
        """Send one message. Raises grpc.aio.UsageError: the call is over, or `done_writing` was called."""
        if self._is_half_closed:
            raise grpc.aio.UsageError("the call is half-closed")
        stream = await self._started()
        if stream is None:
            raise grpc.aio.UsageError("the call is over")
        await stream.write(self._serialize(message))

    async def done_writing(self) -> None:
        """Tell the peer that no message follows. Again: no effect. Raises grpc.aio.UsageError: the call is over."""
        if self._is_half_closed:
            return
        self._is_half_closed = True
        stream = await self._started()
        if stream is None:
            raise grpc.aio.UsageError("the call is over")
        await stream.drained()
        stream.half_close()

    async def read(self) -> Any:
        """Return the next message, or EOF. Raises asyncio.CancelledError if this side cancelled the call."""
        stream = await self._started()
        data = None
        if stream is not None:
            try:
                data = await stream.read()
                if data is not None:
                    return self._deserialize(data)
                if self._status is None:
                    self._end(grpc.StatusCode.INTERNAL, "the peer ended the call without a status")
            except grpc.aio.UsageError:
                await self._ended.wait()
            except WireError as error:
                self._end(error.code, str(error))
            except Exception as error:  # noqa: BLE001  # the codec may raise any error: the bytes come from a peer
                self._end(grpc.StatusCode.INTERNAL, f"a message cannot be parsed: {error}")
        if self._is_cancelled:
            raise asyncio.CancelledError
        return EOF

    def cancel(self) -> bool:
        """End the call. Return False if it was over."""
        if self._status is not None:
            return False
        self._is_cancelled = True
        self._end(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        return True

    async def code(self) -> grpc.StatusCode:
        """Return the status of the call, once it is over."""
        await self._ended.wait()
        assert self._status is not None
        return self._status[0]

    async def details(self) -> str:
        """Return the text of the status, once the call is over."""
        await self._ended.wait()
        assert self._status is not None
        return self._status[1]

    # What the connection calls.

    def on_stream(self, stream: Stream) -> None:
        """Take the stream of this call."""
        self._stream = stream

    def on_headers(self, event: Headers, stream: Stream) -> None:
        """Take the first header block, or the trailers."""
        http = next((value for name, value in event.fields if name == b":status"), None)
        content = next((value for name, value in event.fields if name == b"content-type"), b"")
        if http is not None and (http != b"200" or not is_grpc(content)):
            code = _HTTP_STATUSES.get(http, grpc.StatusCode.UNKNOWN)
            self._end(code, f"the peer answered with HTTP status {http.decode('ascii', 'replace')}")
            return
        if event.is_end:
            code, text = status_of(event.fields) or (grpc.StatusCode.UNKNOWN, "the peer sent no status")
            self._status = (code, text)
            self._ended.set()
            # Messages that came before the status stay readable.
            stream.on_peer_end()
            if not stream.is_closed:
                stream.reset(ErrorCode.NO_ERROR, keeps_input=True)

    def on_reset(self, code: int, reason: str) -> None:
        """Take the end of the stream by a reset of the peer (`code`), or by the loss of the connection (-1)."""
        if code < 0:
            self._note(grpc.StatusCode.UNAVAILABLE, f"the connection was lost: {reason}")
        else:
            status = _RESETS.get(code, grpc.StatusCode.INTERNAL)
            self._note(status, f"the peer reset the stream: HTTP/2 error {code}")

    async def _start(self, connecting: asyncio.Task[_ClientConnection]) -> Stream | None:
        try:
            connection = await asyncio.shield(connecting)
        except (OSError, ValueError, OverflowError) as error:  # no name of a host, or no port
            self._note(grpc.StatusCode.UNAVAILABLE, f"failed to connect: {error}")
            return None
        except asyncio.CancelledError:
            self._note(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
            return None
        if self._status is None:
            self._connection = connection
            await connection.open(self)
        return self._stream

    async def _started(self) -> Stream | None:
        if self._starting.done():
            return self._starting.result()
        return await asyncio.shield(self._starting)

    def _note(self, code: grpc.StatusCode, text: str) -> None:
        if self._status is None:
            self._status = (code, text)
            self._ended.set()

    def _end(self, code: grpc.StatusCode, text: str) -> None:
        self._note(code, text)
        if self._stream is not None:
            self._stream.reset()
        elif self._connection is not None:
            self._connection.withdraw(self)


class _ClientConnection(Connection):
    def __init__(self, limits: ConnectionLimits, tls: TlsEnd | None, message_bytes_max: int) -> None:
        codec_limits = CodecLimits(
            streams_max=0, header_bytes_max=HEADER_BYTES_MAX, connection_window=CONNECTION_WINDOW
        )
        super().__init__(DirectCodec(codec_limits, is_client=True), limits, tls)
        self._message_bytes_max = message_bytes_max
        self._calls: dict[int, LinkCall] = {}
        self._waiting: dict[LinkCall, asyncio.Future[None]] = {}
        """Calls beyond the number of streams that the peer allows, oldest first."""
        self._open: asyncio.Future[None] = self._loop.create_future()

    async def opened(self) -> None:
        """Return when the peer took the settings. Raises OSError if the connection ended before."""
        await self._open

    async def open(self, call: LinkCall) -> None:
        """Start a stream for `call` as soon as the peer allows one more. End the call if the connection takes none."""
        waiting = self._waiting[call] = self._loop.create_future()
        self._serve_waiting()
        try:
            await waiting
        finally:
            self._waiting.pop(call, None)

    def withdraw(self, call: LinkCall) -> None:
        """Forget a call that waits for its stream and has ended."""
        if call in self._waiting:
            self._waiting.pop(call).set_result(None)

    def _serve_waiting(self) -> None:
        """Start the calls that wait, as far as the peer allows, or end them."""
        while self._waiting:
            takes_none = self.is_lost or self.is_draining
            if not takes_none and len(self.streams) >= self._codec.streams_allowed():
                return
            call = next(iter(self._waiting))
            self._waiting.pop(call).set_result(None)
            if takes_none:
                call.on_reset(-1, self.lost_because or "the peer takes no more calls")
            else:
                self._begin(call)

    def _begin(self, call: LinkCall) -> None:
        number = self._codec.new_stream()
        stream = Stream(self, number, MessageReader(self._message_bytes_max))
        self._calls[number] = call
        self.send_headers(number, call.fields)
        self.add(stream)
        call.on_stream(stream)

    def on_settings(self) -> None:
        self._serve_waiting()

    def on_open(self) -> None:
        if not self._open.done():
            self._open.set_result(None)

    def on_headers(self, event: Headers) -> bool:
        call, stream = self._calls.get(event.stream), self.streams.get(event.stream)
        if call is None or stream is None:
            return False
        call.on_headers(event, stream)
        return True

    def on_stream_reset(self, stream: Stream, code: int) -> None:
        call = self._calls.get(stream.number)
        if call is not None:
            call.on_reset(code, self.lost_because)

    def on_gone_away(self, event: GoneAway) -> None:
        self.is_draining = True  # first: each refused stream leaves its place to a call that waits
        for number in [each for each in self._calls if each > event.last_stream]:
            stream = self.streams.get(number)
            if stream is not None:
                self.on_stream_reset(stream, ErrorCode.REFUSED_STREAM)
                stream.on_reset()
        super().on_gone_away(event)
        self._serve_waiting()

    def forget(self, stream: Stream) -> None:
        super().forget(stream)
        self._calls.pop(stream.number, None)
        self._serve_waiting()

    def on_lost(self, reason: str) -> None:
        self._serve_waiting()
        if not self._open.done():
            self._open.set_exception(ConnectionError(reason))
            self._open.exception()  # nobody waits for it if the channel was closed just before
