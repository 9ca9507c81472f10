"""Encodes a google.rpc.Status with its details by hand, to make refusals cheap. Pure.

Generated messages take three times the CPU (measured once, by hand). Field numbers are those of google/rpc/status.proto
and google/rpc/error_details.proto. A test compares the bytes with the generated classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, TypeAlias

STATUS_BYTES_MAX: Final = 1024
"""Most bytes of a status. Trailers may have 8 KiB in all, and proxies often allow less."""

MESSAGE_BYTES_MAX: Final = 200
VALUE_BYTES_MAX: Final = 80
"""Longest text of the status, and longest value in its details."""

METADATA_MAX: Final = 8
VIOLATIONS_MAX: Final = 16
"""Most entries of a status, as far as they fit."""

CACHED_STATUSES: Final = 256
"""Cached statuses. Many refusals have the same few reasons, and differ only in RetryInfo."""

Pairs: TypeAlias = tuple[tuple[str, str], ...]
"""Field or subject, with its description."""


def status(
    code: int,
    message: str,
    reason: str,
    domain: str,
    metadata: Mapping[str, str],
    retry_after_s: float | None,
    bad_request: Pairs = (),
    quota: Pairs = (),
) -> bytes:
    """Return the encoded status, at most STATUS_BYTES_MAX long. Texts are shortened, and the last violations omitted."""
    before, after = _frame(code, message, reason, domain, tuple(metadata.items()), bad_request, quota)
    return before + after if retry_after_s is None else before + _retry_info(retry_after_s) + after


@lru_cache(maxsize=CACHED_STATUSES)
def _frame(
    code: int, message: str, reason: str, domain: str, metadata: Pairs, bad_request: Pairs, quota: Pairs
) -> tuple[bytes, bytes]:
    """Return the bytes before RetryInfo, and those after it."""
    before = b"\x08" + _varint(code) + _text(b"\x12", message, MESSAGE_BYTES_MAX)
    before += _error_info(reason, domain, metadata)
    after = b""
    for kind, pairs in ((_BAD_REQUEST, bad_request), (_QUOTA_FAILURE, quota)):
        if pairs:
            after += _failure(kind, pairs, STATUS_BYTES_MAX - len(before) - _RETRY_BYTES_MAX - len(after))
    return before, after


def _error_info(reason: str, domain: str, metadata: Pairs) -> bytes:
    info = _text(b"\x0a", reason, VALUE_BYTES_MAX) + _text(b"\x12", domain, VALUE_BYTES_MAX)
    for key, value in metadata[:METADATA_MAX]:
        info += _field(b"\x1a", _pair(key, value, VALUE_BYTES_MAX))
    return _any(_kind("ErrorInfo"), info)


def _failure(kind: bytes, pairs: Pairs, space: int) -> bytes:
    made = b""
    for name, description in pairs[:VIOLATIONS_MAX]:
        one = _field(b"\x0a", _pair(name, description, MESSAGE_BYTES_MAX))
        if len(made) + len(one) > space - len(kind) - 8:
            break
        made += one
    return _any(kind, made) if made else b""


def _any(kind: bytes, value: bytes) -> bytes:
    """Return a google.protobuf.Any as one of the status's details."""
    return _field(b"\x1a", kind + _field(b"\x12", value))


def _pair(name: str, text: str, bytes_max: int) -> bytes:
    """Return a message with the fields 1 and 2 as texts."""
    return _text(b"\x0a", name, VALUE_BYTES_MAX) + _text(b"\x12", text, bytes_max)


def _retry_info(seconds: float) -> bytes:
    whole, nanos = divmod(int(seconds * 1e9), 1_000_000_000)
    if whole > 0x7F:
        duration = b"\x08" + _varint(whole) + b"\x10" + _varint(nanos)
        return _any(_RETRY_INFO, _field(b"\x0a", duration))
    # The same with a varint of five bytes, the longest for nanos. So all lengths are fixed.
    return _RETRY_INFO_SHORT + bytes(
        (
            *(whole, 0x10, nanos & 0x7F | 0x80, nanos >> 7 & 0x7F | 0x80, nanos >> 14 & 0x7F | 0x80),
            *(nanos >> 21 & 0x7F | 0x80, nanos >> 28),
        )
    )


def shortened(text: str, bytes_max: int) -> str:
    """Return `text`, cut if its UTF-8 is longer than `bytes_max`."""
    if 4 * len(text) <= bytes_max or len(encoded := text.encode(errors="replace")) <= bytes_max:
        return text
    return encoded[: bytes_max - 3].decode(errors="ignore") + "..."


def _text(tag: bytes, text: str, bytes_max: int) -> bytes:
    value = text.encode(errors="replace")
    if len(value) > bytes_max:
        value = shortened(text, bytes_max).encode(errors="replace")
    return tag + _SIZES[len(value)] + value


def _field(tag: bytes, value: bytes) -> bytes:
    size = len(value)
    return tag + (_SIZES[size] if size < len(_SIZES) else _varint(size)) + value


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


_SIZES: Final = [_varint(size) for size in range(1024)]


def _kind(name: str) -> bytes:
    """Return the type field of an Any."""
    return _text(b"\x0a", f"type.googleapis.com/google.rpc.{name}", MESSAGE_BYTES_MAX)


_RETRY_INFO: Final = _kind("RetryInfo")
_BAD_REQUEST: Final = _kind("BadRequest")
_QUOTA_FAILURE: Final = _kind("QuotaFailure")
_RETRY_INFO_SHORT: Final = _any(_RETRY_INFO, _field(b"\x0a", b"\x08" + bytes(7)))[:-7]
"""The constant prefix of a RetryInfo."""

_RETRY_BYTES_MAX: Final = len(_RETRY_INFO_SHORT) + 16
