"""gRPC messages in the bytes of a body: length prefix, compression and their limits. No I/O.

Source: the gRPC wire format (grpc/grpc, doc/PROTOCOL-HTTP2.md and doc/compression.md).
"""

from __future__ import annotations

import zlib
from typing import Final

import grpc

PREFIX_BYTES: Final = 5
"""A flag byte for compression, and the length of the message in 4 bytes."""

ENCODINGS: Final = ("identity", "deflate", "gzip")
"""Compressions that this side reads. It compresses nothing itself."""

_WINDOW_BITS: Final = {"deflate": zlib.MAX_WBITS, "gzip": zlib.MAX_WBITS | 16}


class WireError(Exception):
    """The peer broke the gRPC wire format or one of its limits. The call ends with `code` and the text."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def prefixed(message: bytes) -> bytes:
    """Return `message` with its prefix, uncompressed."""
    return b"\0" + len(message).to_bytes(4, "big") + message


class MessageReader:
    """Cuts the bytes of one body into messages.

    INVARIANT: it holds no more than the peer's flow-control window has let in. `bytes_max`: the longest message, before and
    after decompression; negative: any. `encoding`: the call's grpc-encoding, one of ENCODINGS.
    """

    __slots__ = ("_at", "_buffer", "_bytes_max", "_encoding")

    def __init__(self, bytes_max: int, encoding: str = "identity") -> None:
        self._bytes_max = bytes_max
        self._encoding = encoding
        self._buffer: bytes | bytearray = b""
        self._at = 0
        """Start of the next message in the buffer."""

    def __len__(self) -> int:
        """Return the bytes that wait."""
        return len(self._buffer) - self._at

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        if self._at == len(self._buffer):
            self._buffer, self._at = data, 0
            return
        if self._at or not isinstance(self._buffer, bytearray):
            self._buffer, self._at = bytearray(self._buffer[self._at :]), 0
        self._buffer += data

    def clear(self) -> None:
        """Forget the bytes that wait."""
        self._buffer, self._at = b"", 0

    def take(self) -> bytes | None:
        """Return the next message if it is complete, or None. Raises WireError."""
        size = self._message_bytes()
        start = self._at + PREFIX_BYTES
        if size is None or len(self._buffer) < start + size:
            return None
        flag = self._buffer[self._at]
        message = bytes(self._buffer[start : start + size])
        self._at = start + size
        if self._at == len(self._buffer):
            self.clear()
        return self._decompressed(message) if flag else message

    def missing_bytes(self) -> int:
        """Return the bytes until the next message, or its prefix, is complete. Raises WireError."""
        return PREFIX_BYTES + (self._message_bytes() or 0) - len(self)

    def _message_bytes(self) -> int | None:
        """Return the stated length of the next message, or None before its prefix is complete. Raises WireError."""
        buffer, at = self._buffer, self._at
        if len(buffer) - at < PREFIX_BYTES:
            return None
        if buffer[at] > 1:
            raise WireError(
                grpc.StatusCode.INTERNAL, f"compression flag {buffer[at]} of a message: allowed are 0 and 1"
            )
        size = int.from_bytes(buffer[at + 1 : at + PREFIX_BYTES], "big")
        if 0 <= self._bytes_max < size:
            raise self._too_large(f"{size}")
        return size

    def _decompressed(self, message: bytes) -> bytes:
        bits = _WINDOW_BITS.get(self._encoding)
        if bits is None:
            raise WireError(
                grpc.StatusCode.INTERNAL, "a message is compressed, and grpc-encoding names no compression"
            )
        unpacking = zlib.decompressobj(bits)
        limit = self._bytes_max + 1 if self._bytes_max >= 0 else 0
        try:
            plain = unpacking.decompress(message, limit)
        except zlib.error as error:
            raise WireError(
                grpc.StatusCode.INTERNAL, f"a message cannot be decompressed as {self._encoding}: {error}"
            ) from None
        if 0 <= self._bytes_max < len(plain):
            raise self._too_large(f"more than {self._bytes_max}, decompressed")
        if not unpacking.eof:
            raise WireError(
                grpc.StatusCode.INTERNAL, f"a message cannot be decompressed as {self._encoding}: it is cut"
            )
        return plain

    def _too_large(self, size: str) -> WireError:
        return WireError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"received message larger than max: {size} bytes; at most {self._bytes_max} are allowed",
        )
