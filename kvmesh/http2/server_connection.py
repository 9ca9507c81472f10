"""A connection of a client to the server: which requests are calls, and which are refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from kvmesh.http2.codec import Codec, ErrorCode, GoneAway, Headers
from kvmesh.http2.connection import LAST_STREAM_MAX, Connection, ConnectionLimits
from kvmesh.http2.fields import Malformed, NotACall, call_fields, size_of, status_fields
from kvmesh.http2.input_turns import InputTurns
from kvmesh.http2.messages import MessageReader, WireError
from kvmesh.http2.server_call import RESPONSE, ServerCall
from kvmesh.http2.stream import Stream
from kvmesh.http2.tls import TlsEnd

log = logging.getLogger(__name__)

ANNOUNCE_S: Final = 1.0
"""Longest time that a drain waits for the client's answer to a PING behind the first GOAWAY."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Limits of one connection on its calls."""

    streams_max: int
    message_bytes_max: int
    metadata_bytes_max: int


class ServerConnection(Connection):
    """Serves the calls of one client. `handler_of` returns the handler of a path, or None."""

    def __init__(
        self,
        codec: Codec,
        limits: ConnectionLimits,
        calls: CallLimits,
        tls: TlsEnd | None,
        handler_of: Callable[[bytes], Any],
        on_made: Callable[[ServerConnection], bool],
        on_lost: Callable[[ServerConnection], None],
        turns: InputTurns,
    ) -> None:
        """`on_made` returns False if the connection must be closed at once."""
        super().__init__(codec, limits, tls, turns)
        self._call_limits = calls
        self._handler_of = handler_of
        self._on_made = on_made
        self._on_lost = on_lost
        self._calls: dict[int, ServerCall] = {}
        self._last_stream = 0
        self._names: Mapping[str, Sequence[bytes]] | None = None
        self._is_last_known = False
        """True once the peer was told the last stream that is served."""
        self._announcing: asyncio.TimerHandle | None = None
        """Set while a drain waits for the peer to read the first GOAWAY: its calls may be on their way."""

    @property
    def names(self) -> Mapping[str, Sequence[bytes]]:
        """Names in the certificate of the client."""
        if self._names is None:
            self._names = {} if self.tls is None else self.tls.peer_names()
        return self._names

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not self._on_made(self):
            self.is_lost = True
            transport.abort()  # type: ignore[attr-defined]  # of each transport that writes
            return
        super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        # Not before: a closed connection may hold its last bytes for LINGER_S.
        self._on_lost(self)

    def on_headers(self, event: Headers) -> bool:
        number = event.stream
        known = self.streams.get(number)
        if known is not None:  # trailers of a client, which gRPC does not have: only the end counts
            if event.is_end:
                known.on_peer_end()
            return True
        if number <= self._last_stream:  # trailers of a client whose call is over
            return False
        self._last_stream = number
        if len(self.streams) >= self._call_limits.streams_max or self._is_last_known:
            self.reset(number, ErrorCode.REFUSED_STREAM)
            return False
        try:
            self._open(event)
        except NotACall as refusal:
            self._refuse(event, [(b":status", b"%d" % refusal.http_status)], str(refusal))
        except WireError as error:
            self._refuse(event, [*RESPONSE, *status_fields(error.code, str(error), ())], str(error))
        except Malformed as error:
            log.debug("request refused", extra={"peer": self.peer, "why": str(error)})
            self.reset(number, ErrorCode.PROTOCOL_ERROR)
            return False
        return True

    def _open(self, event: Headers) -> None:
        size, limit = size_of(event.fields), self._call_limits.metadata_bytes_max
        if size > limit:
            raise WireError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"received metadata size exceeds limit: {size} bytes; at most {limit} are allowed",
            )
        read = call_fields(event.fields)
        handler = self._handler_of(read.path)
        if handler is None:
            raise WireError(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        inbox = MessageReader(self._call_limits.message_bytes_max, read.encoding)
        stream = Stream(self, event.stream, inbox)
        call = ServerCall(self, stream, event.fields, read)
        self.add(stream)
        self._calls[event.stream] = call
        if event.is_end:
            stream.on_peer_end()
        call.task = self._loop.create_task(call.run(handler, read.path))
        call.task.add_done_callback(lambda _: self._calls.pop(event.stream, None))

    def _refuse(self, event: Headers, fields: list[tuple[bytes, bytes]], why: str) -> None:
        log.debug("request refused", extra={"peer": self.peer, "why": why})
        self.send_last(event.stream, fields, is_reset_too=not event.is_end)

    def on_stream_reset(self, stream: Stream, code: int) -> None:
        call = self._calls.get(stream.number)
        if call is not None:
            call.cancel()

    def drain(self) -> None:
        """Tell the client to go. Calls run on, also those that it starts before it has read this (RFC 9113, 6.8)."""
        if self.is_draining or self.is_lost:
            return
        if not self._is_settled:
            self._announce_last()
            return
        self._announcing = self._loop.call_later(ANNOUNCE_S, self._announce_last)
        self.go_away(LAST_STREAM_MAX)
        self.ping()

    def on_gone_away(self, event: GoneAway) -> None:
        self._stop_announcing()
        super().on_gone_away(event)

    def on_lost(self, reason: str) -> None:
        self._stop_announcing()

    def on_pong(self) -> None:
        if self.is_draining and not self._is_last_known:
            # In the next turn: grpc's core writes its answer before the headers of calls that it began earlier.
            self._stop_announcing()
            self._announcing = self._loop.call_later(0, self._announce_last)

    def end_calls(self, code: grpc.StatusCode, details: str) -> None:
        """End all calls with a status."""
        for call in list(self._calls.values()):
            call.end(code, details)

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks of the calls that are open."""
        return [call.task for call in self._calls.values() if call.task is not None]

    def _close_if_idle(self) -> None:
        if self._announcing is None:
            super()._close_if_idle()

    def _stop_announcing(self) -> None:
        if self._announcing is not None:
            self._announcing.cancel()
            self._announcing = None

    def _announce_last(self) -> None:
        self._stop_announcing()
        self._is_last_known = True
        self.go_away(self._last_stream)
