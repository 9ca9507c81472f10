"""The resume token: what another frontend needs to go on with a broken stream. Opaque to clients; holds no prompt.

Pure. Layout, little-endian: 2 bytes mark and version, 16 bytes request id, 8 bytes seed, 2 bytes attempt base, 8 bytes
digest of everything that shapes the output, 1 byte length and the model version, 16 bytes HMAC-SHA256 over all before.
Who could make a token could end a stranger's stream: only the mesh signs (decision 0007).
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import Final

ATTEMPT_STRIDE: Final = 256
"""Attempt numbers one frontend may use: [base + 1, base + ATTEMPT_STRIDE). A frontend that resumes starts at the next
base, above anything the first one could have sent, so that what still runs for it is superseded where it is seen."""

ATTEMPT_BASE_MAX: Final = 65_536 - ATTEMPT_STRIDE

_MARK: Final = b"k\x02"
_HEAD: Final = struct.Struct("<2s16sQHQB")
_SIGNATURE_BYTES: Final = 16

SECRET_BYTES: Final = 32
"""Length of the mesh's secret."""


TOKEN_BYTES_MAX: Final = _HEAD.size + 255 + _SIGNATURE_BYTES


class ResumeTokenError(ValueError):
    """The bytes are no resume token this version reads; says why without showing them."""


class Seal:
    """Signs tokens with the mesh's secret, and knows its own signatures again.

    After a change of the secret the one before still holds, so that streams that run can be resumed here.
    """

    def __init__(self, secret: bytes) -> None:
        self._secrets: tuple[bytes, ...] = (secret,)

    @property
    def secret(self) -> bytes:
        """What new tokens are signed with."""
        return self._secrets[0]

    def take(self, secret: bytes) -> bool:
        """Sign with `secret` from now on. Return True if that is another one."""
        if secret == self.secret:
            return False
        self._secrets = (secret, self.secret)
        return True

    def sign(self, body: bytes) -> bytes:
        """Return `body` with its signature behind it."""
        return body + _signature(self.secret, body)

    def open(self, data: bytes) -> bytes | None:
        """Return what was signed, or None if the signature is not the mesh's."""
        body, signature = data[:-_SIGNATURE_BYTES], data[-_SIGNATURE_BYTES:]
        found = [hmac.compare_digest(_signature(each, body), signature) for each in self._secrets]
        return body if any(found) else None


def _signature(secret: bytes, body: bytes) -> bytes:
    return hmac.digest(secret, body, hashlib.sha256)[:_SIGNATURE_BYTES]


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

    def pack(self, seal: Seal) -> bytes:
        """Return the token as bytes, signed."""
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
        return seal.sign(body)


def unpack(data: bytes, seal: Seal) -> ResumeToken:
    """Read a token. Raises ResumeTokenError."""
    if not _HEAD.size + _SIGNATURE_BYTES <= len(data) <= TOKEN_BYTES_MAX:
        raise ResumeTokenError(f"it has {len(data)} bytes")
    if data[: len(_MARK)] != _MARK:
        raise ResumeTokenError("it is of another kind or version")
    body = seal.open(data)
    if body is None:
        raise ResumeTokenError("its signature is not this mesh's")
    _, request_id, seed, base, digest, length = _HEAD.unpack_from(body)
    version = body[_HEAD.size :]
    if len(version) != length:
        raise ResumeTokenError("its length does not match")
    try:
        return ResumeToken(request_id.hex(), seed, base, digest, version.decode())
    except UnicodeDecodeError:
        raise ResumeTokenError("its model version is no text") from None
