"""One HTTP/1.1 connection of a client: uvicorn's protocol, with bounds on headers, time and unread bytes.

uvicorn bounds neither the size nor the time of a request's headers. A connection reads no body before the application asks
for it. So a client cannot fill memory with requests that wait.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from kvmesh.http1.connections import Connections
from kvmesh.http1.limits import RECEIVE_BUFFER_BYTES, HttpLimits

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


class _Refused(Exception):
    """The request is refused while it is parsed."""

    def __init__(self, status: int, text: str, code: str) -> None:
        super().__init__(text)
        self.status, self.text, self.code = status, text, code


class HttpConnection(HttpToolsProtocol):
    """See the module."""

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
        self._refused: _Refused | None = None
        self._identities: Sequence[str] = ()
        self._is_draining = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the parent
        """See asyncio.Protocol."""
        if not self._registry.add(self):
            transport.abort()
            self.transport = transport
            return
        plain = transport.get_extra_info("socket")
        if plain is not None:
            with suppress(OSError):
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        super().connection_made(transport)
        self._identities = _names(transport.get_extra_info("ssl_object"))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._end_head()
        self._registry.discard(self)
        if self.flow is not None:
            super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        if self._head_timer is None and self._has_no_request():
            self._await_head()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._end(
                400, "Upgrade is not served; send HTTP/1.1 without the header Upgrade", "UPGRADE_REFUSED"
            )
        except httptools.HttpParserError as error:
            refused = self._refused
            if refused is not None:
                self._end(refused.status, refused.text, refused.code)
            else:
                self._end(400, f"this is no HTTP/1.1 request: {error}"[:200], "HTTP_MALFORMED")

    def on_message_begin(self) -> None:
        """See httptools."""
        self._head_bytes = 0
        self._is_in_head = True
        super().on_message_begin()
        if self._identities:
            self.scope["extensions"] = {IDENTITIES: {NAMES: self._identities}}

    def on_url(self, url: bytes) -> None:
        """See httptools."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools. Called for trailers, too, which are ignored."""
        self._count(len(name) + len(value) + 4)
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._end_head()
        self._is_in_head = False
        self._registry.set_busy(self)
        try:
            super().on_headers_complete()
        except (ValueError, httptools.HttpParserError) as error:  # for example a path that is no ASCII
            self._refused = _Refused(400, f"the request target is malformed: {error}"[:200], "HTTP_MALFORMED")
            raise
        self.scope.setdefault("extensions", {})[PARTS] = {TRY_WRITE: PartWriter(self.cycle)}
        if self._is_draining:
            self.cycle.keep_alive = False
        # The application reads the body once it may take the memory for it.
        self.flow.pause_reading()

    def on_response_complete(self) -> None:
        """See uvicorn."""
        super().on_response_complete()
        if self._has_no_request() and not self.transport.is_closing():
            self._registry.set_idle(self)

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

    def _count(self, size: int) -> None:
        self._head_bytes += size
        most = self._limits.head_bytes_max
        if self._head_bytes > most:
            self._refused = _Refused(
                431, f"line and headers of the request have more than {most} bytes", "HEADERS_TOO_LARGE"
            )
            raise self._refused

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.head_s, self._on_late)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_late(self) -> None:
        self._head_timer = None
        if self._is_in_head:
            late = f"the headers did not arrive within {self._limits.head_s:g} s (frontend.request_timeout_s)"
            self._end(408, late, "REQUEST_TIMEOUT")
        else:
            self.transport.close()

    def _end(self, status: int, text: str, code: str) -> None:
        """Refuse the request, and close the connection. The response of an earlier one, if there is one, is cut."""
        self._end_head()
        if self._has_no_request():
            body = self._fault(status, text, code)
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(
                body
            )
            self.transport.write(b"".join([STATUS_LINE[status], head, body]))
        self.transport.close()


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
