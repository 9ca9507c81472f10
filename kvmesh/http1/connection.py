"""One HTTP/1.1 connection of a client: uvicorn's protocol, with bounds on headers, time and unread bytes.

uvicorn bounds neither the size nor the time of a request's headers, and not the number of requests that wait behind another
one. A connection reads no body before the application asks for it. So a client cannot fill memory with requests that wait.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from kvmesh.http1 import heads
from kvmesh.http1.connections import Connections
from kvmesh.http1.ending import LINGER_BYTES, EndingTransport
from kvmesh.http1.heads import Refused
from kvmesh.http1.limits import HEADER_BYTES, PIPELINED_MAX, RECEIVE_BUFFER_BYTES, UNREAD_BYTES, HttpLimits

log = logging.getLogger(__name__)

IDENTITIES: Final = "kvmesh.identities"
"""Key of a scope's `extensions`. Its value has, under NAMES, the names in the certificate of the client."""

NAMES: Final = "names"
"""Key of the names as `CallHead.identities` has them."""

PARTS: Final = "kvmesh.parts"
"""Key of a scope's `extensions`. Its value has, under TRY_WRITE, a PartWriter."""

TRY_WRITE: Final = "try_write"
"""Key of the PartWriter."""

Fault = Callable[[int, str, str], bytes]
"""Makes the JSON body of an error of HTTP itself from status, text and code."""


class HttpConnection(HttpToolsProtocol):
    """See the module."""

    transport: EndingTransport  # type: ignore[assignment]  # the part of asyncio's that is used

    def __init__(
        self,
        config: Config,
        state: ServerState,
        limits: HttpLimits,
        connections: Connections,
        fault: Fault,
    ) -> None:
        super().__init__(config=config, server_state=state, app_state={})
        self.access_log = False
        self._limits = limits
        self._registry = connections
        self._fault = fault
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        """Runs while the headers of a request are awaited."""
        self._is_in_head = False
        self._feeding = 0
        """Size of the input that is parsed now."""
        self._idle_bytes = 0
        """Input since the last step of a request: its start, a part of its body, its end."""
        self._running: RequestResponseCycle | None = None
        """The request that was started last. `cycle` is the one that arrived last."""
        self._queued_bytes = 0
        """Bytes of the headers of requests that wait behind the running one."""
        self._keeps_alive = False
        """True if the connection stays open behind the request that arrived last, once its body is there."""
        self._is_muted = False
        """True while the parser is prepared for the body of a request that offers an upgrade."""
        self._is_over = False
        """True once no more requests are read."""
        self._dropped_bytes = 0
        self._refused: Refused | None = None
        self._identities: Sequence[str] = ()
        self._is_draining = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the parent
        """See asyncio.Protocol."""
        ending = EndingTransport(transport, self._has_input_left)
        if not self._registry.add(self):
            transport.abort()
            self.transport = ending
            return
        plain = transport.get_extra_info("socket")
        if plain is not None:
            with suppress(OSError):
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNREAD_BYTES)
        transport.set_write_buffer_limits(high=UNREAD_BYTES)
        super().connection_made(ending)  # type: ignore[arg-type]  # the part of asyncio's that is used
        self._identities = _names(transport.get_extra_info("ssl_object"))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._end_head()
        self._registry.discard(self)
        self.pipeline.clear()
        if self._running is not None:
            _disconnect(self._running)
        if self.flow is not None:
            super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self.transport.lost()

    def eof_received(self) -> None:
        """See asyncio.Protocol. A client that closes its half counts as gone, and its request is cancelled."""
        if self._has_no_request():
            self.transport.bound_flush()
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self.transport.is_closing():
            self.transport.drop(len(data))
            return
        if self._is_over:
            self._drop(len(data))
            return
        self._unset_keepalive_if_required()
        if self._head_timer is None and self._has_no_request():
            self._await_head()
        self._feeding = len(data)
        try:
            self._feed(data)
            self._idle_bytes += len(data)
            if self._idle_bytes > self._limits.head_bytes_max:
                raise heads.too_large(self._limits.head_bytes_max)
        except (Refused, httptools.HttpParserError) as error:
            refused = error if isinstance(error, Refused) else self._refused
            self._refuse(refused or Refused(400, f"this is no HTTP/1.1 request: {error}"[:200]))
            return
        if self.pipeline:
            # The end of the connection is noticed as long as it is read.
            if self.cycle.more_body:
                self.flow.pause_reading()
            else:
                self.flow.resume_reading()

    def on_message_begin(self) -> None:
        """See httptools."""
        if self._is_muted:
            return
        self._idle_bytes = -self._feeding
        self._head_bytes = 0
        self._is_in_head = True
        super().on_message_begin()
        if self._identities:
            self.scope["extensions"] = {IDENTITIES: {NAMES: self._identities}}

    def on_url(self, url: bytes) -> None:
        """See httptools."""
        if not self._is_muted:
            self._count(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools. Called for trailers, too, which are ignored."""
        if self._is_muted:
            return
        self._count(len(name) + len(value) + HEADER_BYTES)
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """See httptools."""
        if self._is_muted:
            return
        self._end_head()
        self._is_in_head = False
        is_queued = not self._has_no_request()
        try:
            heads.check(self.parser.get_method(), self.parser.get_http_version(), self.headers)
            self._check_queue(is_queued)
        except Refused as error:
            self._refused = error
            raise
        self._registry.set_busy(self)
        try:
            super().on_headers_complete()
        except (ValueError, AttributeError, httptools.HttpParserError):  # no path, or one that is no ASCII
            self._refused = Refused(400, f"the request target is malformed: {self.url[:100]!r}")
            raise
        self.scope.setdefault("extensions", {})[PARTS] = {TRY_WRITE: PartWriter(self.cycle)}
        # A response that is sent before the body is there ends the connection: the client may never send the body.
        self._keeps_alive, self.cycle.keep_alive = self.cycle.keep_alive, False
        if not is_queued:
            # The application reads the body once it may take the memory for it.
            self.flow.pause_reading()
        self._is_muted = self.parser.should_upgrade() and bool(heads.framing(self.headers))

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._idle_bytes = -self._feeding
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        if self._is_muted:
            return
        self._idle_bytes = -self._feeding
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keeps_alive and not self._is_draining
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """See uvicorn."""
        super().on_response_complete()
        if not self.pipeline:
            self._queued_bytes = 0
        if self._has_no_request():
            self._registry.set_idle(self)
            if self._is_in_head and not self.transport.is_closing():
                self._await_head()

    def shutdown(self) -> None:
        """Close the connection now, or with the end of its response."""
        self._is_draining = True
        if self.flow is not None:
            super().shutdown()

    def evict(self) -> None:
        """See Connections."""
        self.transport.abort()

    def cut(self) -> None:
        """End the connection now, with its request."""
        self.transport.abort()

    def _has_no_request(self) -> bool:
        return (self.cycle is None or self.cycle.response_complete) and not self.pipeline

    def _has_input_left(self) -> bool:
        return self._is_over or self._is_in_head or (self.cycle is not None and self.cycle.more_body)

    def _feed(self, data: bytes) -> None:
        """Parse `data`. Raises HttpParserError.

        An offer to upgrade is ignored (RFC 9110, 7.8). JDK's client and curl offer h2c with a first request.
        """
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                if self._is_muted:
                    self._expect_body()
            else:
                return

    def _expect_body(self) -> None:
        """Let a new parser read the body of the request: the old one has taken it for another protocol's bytes."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % heads.framing(self.headers))
        self._is_muted = False

    def _check_queue(self, is_queued: bool) -> None:
        """Raise Refused if too many requests wait behind the running one (pipelining)."""
        if is_queued:
            self._queued_bytes += self._head_bytes
            if len(self.pipeline) >= PIPELINED_MAX or self._queued_bytes > self._limits.head_bytes_max:
                raise Refused(400, f"more than {PIPELINED_MAX} requests wait behind another one")

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._limits.head_bytes_max:
            self._refused = heads.too_large(self._limits.head_bytes_max)
            raise self._refused

    def _drop(self, size: int) -> None:
        """Drop input behind the last request, so that the end of the connection is noticed."""
        self._dropped_bytes += size
        if self._dropped_bytes > LINGER_BYTES:
            self.flow.pause_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        task = self.loop.create_task(self._serve(cycle, app), name="http-request")
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    async def _serve(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Run the application for one request. A response that it leaves unfinished is cut."""
        try:
            await app(cycle.scope, cycle.receive, cycle.send)
        except Exception:
            log.exception("bug in an HTTP application", extra={"path": cycle.scope["path"]})
            if not cycle.response_started and not cycle.disconnected:
                self._answer(Refused(500, "internal error", "INTERNAL"))
                cycle.response_complete = True
                self.transport.close()
        finally:
            if not (cycle.response_complete or self.transport.is_closing()):
                self.transport.abort()
            # Without a cycle of references a request that is over is freed at once.
            cycle.on_response = _nothing
            cycle.scope.pop("extensions", None)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.head_s, self._on_late)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self._is_in_head:
            late = f"the headers did not arrive within {self._limits.head_s:g} s (frontend.request_timeout_s)"
            self._refuse(Refused(408, late, "REQUEST_TIMEOUT"))
        else:
            self.transport.close()

    def _refuse(self, refused: Refused) -> None:
        """Read no more requests. Answer `refused` if its request comes first; else answer the ones before it, and close."""
        self._end_head()
        self._is_over = True
        running, is_in_body = self._running, self.cycle is not None and self.cycle.more_body
        if self._has_no_request():
            self._answer(refused)
            self.transport.close()
        elif not is_in_body:
            self.cycle.keep_alive = False
        elif self.pipeline:
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else running  # type: ignore[assignment]  # it runs
            self.cycle.keep_alive = False
        else:
            if not self.cycle.response_started:
                self._answer(refused)
            _disconnect(self.cycle)
            self.transport.close()

    def _answer(self, refused: Refused) -> None:
        body = self._fault(refused.status, refused.text, refused.code)
        size = b"content-length: %d\r\n" % len(body)
        head = b"content-type: application/json\r\n" + size + b"connection: close\r\n\r\n"
        self.transport.write(b"".join([STATUS_LINE[refused.status], head, body]))


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Tell the application that the client of `cycle` has gone."""
    if not cycle.response_complete:
        cycle.disconnected = True
    cycle.message_event.set()


def _nothing() -> None:
    pass


class PartWriter:
    """Writes parts of one response, without the message and the coroutines of ASGI's `send`."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def __call__(self, data: bytes) -> bool:
        """Write `data`, some of the body, not empty. False: the body is not chunked, or the transport takes nothing now."""
        cycle = self._cycle
        if (
            not cycle.chunked_encoding
            or cycle.flow.write_paused
            or cycle.disconnected
            or cycle.response_complete
        ):
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


def _names(tls: ssl.SSLObject | None) -> Sequence[str]:
    """Return the names of the client's certificate: the alternative names, else the common name. Empty without one."""
    found: Any = tls.getpeercert() if tls is not None else None
    if not found:
        return ()
    alternative = [value for _, value in found.get("subjectAltName", ())]
    return alternative or [
        value for rdn in found.get("subject", ()) for key, value in rdn if key == "commonName"
    ]
