"""The HTTP responses of the metrics port: metrics, liveness, readiness. Pure.

    /metrics   200, the metrics of Prometheus
    /healthz   200 while the event loop turns: liveness. It depends on no peer, no engine, no Redis and no drain.
    /readyz    200, or 503 with the reason in one line: readiness

The syntax of a request is that of RFC 9112, sections 2 and 3. A query is ignored, and so are headers and bodies. Any other
request gets an error of one line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvmesh import health_reason

METRICS: Final = "/metrics"
HEALTHZ: Final = "/healthz"
READYZ: Final = "/readyz"

HEAD_BYTES_MAX: Final = 16 << 10
"""Longest head of a request: its line, its headers, and the empty line behind them."""

_REQUEST_LINE: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([!-~]+) HTTP/1\.[0-9]\r?")
_ORIGIN: Final = re.compile(r"https?://[^/?#]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Sources:
    """Contents of the pages, read at each request. Both are fast."""

    metrics: Callable[[], bytes]
    """Returns the metrics in the text format of Prometheus."""
    unready_reason: Callable[[], str]
    """Returns why the process is not ready. Empty: it is ready."""


@dataclass(frozen=True, slots=True)
class _Page:
    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    allow: str = ""

    def encoded(self, *, has_body: bool = True) -> bytes:
        """Return the response. Without its body, as for HEAD, its head is the same."""
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {len(self.body)}",
            *((f"Allow: {self.allow}",) if self.allow else ()),
            "Cache-Control: no-store",
            "Connection: close",
        )
        return "\r\n".join((*head, "", "")).encode("ascii") + (self.body if has_body else b"")


def response(received: bytes, sources: Sources) -> bytes | None:
    """Return the response to the request that begins with `received`. None: the rest of its head is missing."""
    head = received[:HEAD_BYTES_MAX]
    line, line_end, _ = head.partition(b"\n")
    if line_end:
        request = _REQUEST_LINE.fullmatch(line)
        if request is None:
            return _line(HTTPStatus.BAD_REQUEST, "this is no request line of HTTP/1.0 or HTTP/1.1").encoded()
        if b"\n\r\n" in head or b"\n\n" in head:
            method, target = (part.decode("ascii") for part in request.groups())
            return _page(method, target, sources).encoded(has_body=method != "HEAD")
    if len(received) < HEAD_BYTES_MAX:
        return None
    too_long = f"the head of the request has {HEAD_BYTES_MAX} bytes or more"
    return _line(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, too_long).encoded()


def fault() -> bytes:
    """Return the response to a request that ran into a bug."""
    return _line(HTTPStatus.INTERNAL_SERVER_ERROR, "a bug: the log of the process has it").encoded()


def path_of(target: str) -> str:
    """Return the path of a request target in origin form or absolute form, without its query."""
    return _ORIGIN.sub("", target, count=1).partition("?")[0]


def _page(method: str, target: str, sources: Sources) -> _Page:
    if method not in ("GET", "HEAD"):
        allowed = "GET, HEAD"
        return _Page(HTTPStatus.METHOD_NOT_ALLOWED, b"the method must be GET or HEAD\n", allow=allowed)
    path = path_of(target)
    if path == METRICS:
        return _Page(HTTPStatus.OK, sources.metrics(), CONTENT_TYPE_LATEST)
    if path == HEALTHZ:
        return _line(HTTPStatus.OK, "ok")
    if path == READYZ:
        reason = sources.unready_reason()
        if not reason:
            return _line(HTTPStatus.OK, "ready")
        return _line(HTTPStatus.SERVICE_UNAVAILABLE, health_reason.shown(reason) or "not ready")
    return _line(HTTPStatus.NOT_FOUND, f"the paths are {METRICS}, {HEALTHZ} and {READYZ}")


def _line(status: HTTPStatus, text: str) -> _Page:
    return _Page(status, f"{text}\n".encode("ascii"))
