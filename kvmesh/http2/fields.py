"""Header fields of gRPC: metadata, timeouts, status messages, and which requests are calls at all. No I/O.

Source: the gRPC wire format (grpc/grpc, doc/PROTOCOL-HTTP2.md).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias
from urllib.parse import quote_from_bytes, unquote_to_bytes

import grpc

from kvmesh.http2.codec import Fields
from kvmesh.http2.messages import ENCODINGS, WireError

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]

CONTENT_TYPE: Final = b"application/grpc"
ACCEPTED_ENCODINGS: Final = (b"grpc-accept-encoding", ",".join(ENCODINGS).encode())

TIMEOUT_DIGITS_MAX: Final = 8
_UNITS_S: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_OF_TRANSPORT: Final = frozenset(
    (
        b"te",
        b"content-type",
        b"content-length",
        b"host",
        b"grpc-timeout",
        b"grpc-encoding",
        b"grpc-accept-encoding",
        b"grpc-status",
        b"grpc-message",
    )
)
"""Fields of the transport, which no handler sees."""

_PLAIN: Final = bytes(each for each in range(0x20, 0x7F) if each != 0x25)
"""Bytes of a grpc-message that are not percent-encoded."""

_HPACK_ENTRY_BYTES: Final = 32

_PSEUDO: Final = [b":authority", b":method", b":path", b":scheme"]
_PSEUDO_WITHOUT_AUTHORITY: Final = _PSEUDO[1:]
_OF_HTTP_1: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
_BAD_NAME: Final = re.compile(rb"[A-Z\x00-\x09\x0b-\x20\x7f-\xff]|.:")
_BAD_VALUE: Final = re.compile(rb"[\x00\r\n]")


class CallFields(NamedTuple):
    """The fields of a request that gRPC itself reads."""

    path: bytes
    timeout_s: float | None
    encoding: str


class Malformed(Exception):
    """The fields break HTTP/2 (RFC 9113, 8.2 and 8.3). The stream ends with PROTOCOL_ERROR."""


class NotACall(Exception):
    """The request is no gRPC call. It is answered with an HTTP status."""

    def __init__(self, http_status: int, text: str) -> None:
        super().__init__(text)
        self.http_status = http_status


def size_of(fields: Fields) -> int:
    """Return the size of a header list in bytes (RFC 9113, 6.5.2)."""
    return sum(len(name) + len(value) + _HPACK_ENTRY_BYTES for name, value in fields)


def call_fields(fields: Fields) -> CallFields:
    """Return what gRPC reads of a request. Raises Malformed, NotACall, or WireError for a call that cannot be served."""
    _check(fields)
    method = path = content_type = b""
    timeout: bytes | None = None
    encoding = b"identity"
    for name, value in fields:
        if name == b":path":
            path = value
        elif name == b":method":
            method = value
        elif name == b"content-type":
            content_type = value
        elif name == b"grpc-timeout":
            timeout = value
        elif name == b"grpc-encoding":
            encoding = value
    if method != b"POST":
        raise NotACall(405, f":method {_shown(method)}: gRPC uses POST")
    if not is_grpc(content_type):
        raise NotACall(415, f"content-type {_shown(content_type)}: allowed is application/grpc")
    coding = encoding.decode("ascii", "replace")
    if coding not in ENCODINGS:
        raise WireError(
            grpc.StatusCode.UNIMPLEMENTED,
            f"grpc-encoding {_shown(encoding)}: allowed are {', '.join(ENCODINGS)}",
        )
    return CallFields(path, None if timeout is None else parse_timeout(timeout), coding)


def _check(fields: Fields) -> None:
    """Raise Malformed for a request that an HTTP/2 server must not take, except for spaces around a value."""
    names = [name for name, _ in fields]
    pseudo = sorted(name for name in names if name[:1] == b":")
    if pseudo != _PSEUDO and pseudo != _PSEUDO_WITHOUT_AUTHORITY:
        raise Malformed(f"pseudo-header fields {_shown(b' '.join(pseudo))}: each must be there, once")
    if any(name[:1] != b":" for name in names[: len(pseudo)]):
        raise Malformed("a pseudo-header field follows another field")
    joined = b"\n".join(names)
    if _BAD_NAME.search(joined) or b"" in names:
        raise Malformed("a field's name has upper-case letters or controls, or is empty")
    if _BAD_VALUE.search(b" ".join([value for _, value in fields])):
        raise Malformed("a field's value has NUL, CR or LF")
    if not _OF_HTTP_1.isdisjoint(names):
        raise Malformed("a field of HTTP/1.1 that names properties of the connection")


def is_grpc(content_type: bytes) -> bool:
    """Return True if `content_type` is that of gRPC, with or without the name of a message format."""
    return content_type == CONTENT_TYPE or (
        content_type.startswith(CONTENT_TYPE)
        and content_type[len(CONTENT_TYPE) : len(CONTENT_TYPE) + 1] in b"+;"
    )


def parse_timeout(value: bytes) -> float:
    """Return the seconds of a grpc-timeout. Raises WireError."""
    digits, unit = value[:-1], value[-1:].decode("ascii", "replace")
    if not (1 <= len(digits) <= TIMEOUT_DIGITS_MAX and digits.isdigit() and unit in _UNITS_S):
        raise WireError(
            grpc.StatusCode.INTERNAL,
            f"grpc-timeout {_shown(value)}: allowed are 1 to {TIMEOUT_DIGITS_MAX} digits and one of H M S m u n",
        )
    return int(digits) * _UNITS_S[unit]


def metadata_of(fields: Fields) -> tuple[tuple[str, str | bytes], ...]:
    """Return the metadata of a call or of a status. Raises WireError for a "-bin" value that is no base64."""
    found: list[tuple[str, str | bytes]] = []
    for name, value in fields:
        if name[:1] == b":" or name in _OF_TRANSPORT:
            continue
        key = name.decode("ascii", "replace")
        if not key.endswith("-bin"):
            found.append((key, _text(value)))
            continue
        for part in value.split(b","):
            try:
                found.append((key, base64.b64decode(part + b"=" * (-len(part) % 4), validate=True)))
            except binascii.Error:
                raise WireError(grpc.StatusCode.INTERNAL, f"metadata {key}: its value is no base64") from None
    return tuple(found)


def fields_of(metadata: Iterable[tuple[str, str | bytes]]) -> list[tuple[bytes, bytes]]:
    """Return metadata as header fields. Values of "-bin" keys become base64."""
    made = []
    for key, value in metadata:
        data = value.encode() if isinstance(value, str) else value
        if key.endswith("-bin"):
            data = base64.b64encode(data).rstrip(b"=")
        made.append((key.lower().encode("ascii"), data))
    return made


def status_fields(code: grpc.StatusCode, details: str, metadata: Metadata) -> list[tuple[bytes, bytes]]:
    """Return the trailers of a call."""
    fields = [(b"grpc-status", b"%d" % code.value[0])]
    if details:
        fields.append(
            (b"grpc-message", quote_from_bytes(details.encode("utf-8", "replace"), _PLAIN).encode())
        )
    if metadata:
        fields += fields_of(metadata)
    return fields


def status_of(fields: Fields) -> tuple[grpc.StatusCode, str] | None:
    """Return code and message of the trailers of a call; None: they have no status."""
    code: grpc.StatusCode | None = None
    message = ""
    for name, value in fields:
        if name == b"grpc-status":
            code = _CODES.get(value, grpc.StatusCode.UNKNOWN)
        elif name == b"grpc-message":
            message = unquote_to_bytes(value).decode("utf-8", "replace")
    return None if code is None else (code, message)


def _text(value: bytes) -> str | bytes:
    """Return a metadata value as text; bytes that are no UTF-8 stay bytes, as those of grpc.aio."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _shown(value: bytes) -> str:
    return repr(value[:64].decode("ascii", "replace"))


_CODES: Final = {b"%d" % code.value[0]: code for code in grpc.StatusCode}
