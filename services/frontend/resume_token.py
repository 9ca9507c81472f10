"""The resume token: what another frontend needs to go on with a broken stream. Opaque to clients; holds no prompt.

Pure. Layout, little-endian: 2 bytes mark and version, 16 bytes request id, 8 bytes seed, 2 bytes attempt base, 8 bytes
digest of everything that shapes the output, 1 byte length and the model version, 4 bytes check over all before.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

ATTEMPT_STRIDE: Final = 256
"""Attempt numbers one frontend may use: [base + 1, base + ATTEMPT_STRIDE). A frontend that resumes starts at the next
base, above anything the first one could have sent, so that what still runs for it is superseded where it is seen."""

ATTEMPT_BASE_MAX: Final = 65_536 - ATTEMPT_STRIDE

_MARK: Final = b"k\x01"
_HEAD: Final = struct.Struct("<2s16sQHQB")
_CHECK: Final = struct.Struct("<I")


class ResumeTokenError(ValueError):
    """The bytes are no resume token this version reads; says why without showing them."""


@dataclass(frozen=True, slots=True)
class ResumeToken:
    """See the module."""

    request_id: str
    """32 lower-case hexadecimal digits."""
    seed: int
    attempt_base: int
    """Attempts of the frontend that made the token are in [attempt_base + 1, attempt_base + ATTEMPT_STRIDE)."""
    digest: int
    model_version: str

    def pack(self) -> bytes:
        """Return the token as bytes."""
        version = self.model_version.encode()
        body = (
            _HEAD.pack(
                _MARK,
                bytes.fromhex(self.request_id),
                self.seed,
                self.attempt_base,
                self.digest,
                len(version),
            )
            + version
        )
        return body + _CHECK.pack(xxhash.xxh32_intdigest(body))


def unpack(data: bytes) -> ResumeToken:
    """Read a token. Raises ResumeTokenError."""
    if len(data) < _HEAD.size + _CHECK.size:
        raise ResumeTokenError(f"it has {len(data)} bytes")
    if data[: len(_MARK)] != _MARK:
        raise ResumeTokenError("it is of another kind or version")
    body, check = data[: -_CHECK.size], data[-_CHECK.size :]
    if xxhash.xxh32_intdigest(body) != _CHECK.unpack(check)[0]:
        raise ResumeTokenError("its check does not match")
    _, request_id, seed, base, digest, length = _HEAD.unpack_from(body)
    version = body[_HEAD.size :]
    if len(version) != length:
        raise ResumeTokenError("its length does not match")
    try:
        return ResumeToken(request_id.hex(), seed, base, digest, version.decode())
    except UnicodeDecodeError:
        raise ResumeTokenError("its model version is no text") from None
