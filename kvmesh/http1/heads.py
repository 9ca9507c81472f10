"""Rules for the line and the headers of a request beside those of the parser. Pure.

A request that proxies and servers read differently can hide another one (request smuggling). It is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvmesh.http1.limits import HEADER_BYTES

VERSIONS: Final = ("1.0", "1.1")


class Refused(Exception):
    """A request that is refused while it is parsed: status, text and code of its response."""

    def __init__(self, status: int, text: str, code: str = "HTTP_MALFORMED") -> None:
        super().__init__(text)
        self.status, self.text, self.code = status, text, code


def check(method: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise Refused for a version, method, host or transfer encoding that is not served. Names are lower case."""
    if version not in VERSIONS:
        raise Refused(400, f"the version is HTTP/{version}; HTTP/1.1 and HTTP/1.0 are served")
    if method == b"CONNECT":
        raise Refused(405, "CONNECT is not served", "METHOD_NOT_ALLOWED")
    hosts = 0
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding":
            if version == "1.0":
                raise Refused(400, "HTTP/1.0 has no Transfer-Encoding")
            if value.strip().lower() != b"chunked":
                raise Refused(400, f"Transfer-Encoding is {value[:40]!r}; only chunked is served")
    # RFC 9112, 3.2.
    if hosts > 1 or (version == "1.1" and not hosts):
        raise Refused(400, f"the request has {hosts} headers Host; HTTP/1.1 has one")


def framing(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the header line that frames the body of a request; empty: it has none. Names are lower case."""
    for name, value in headers:
        if name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0 ")):
            return b"%b: %b\r\n" % (name, value)
    return b""


def too_large(most: int) -> Refused:
    """Return the refusal of a line, headers or trailers with more than `most` bytes."""
    text = f"line, headers and trailers of the request have more than {most} bytes, {HEADER_BYTES} more for each header"
    return Refused(431, text, "HEADERS_TOO_LARGE")
