"""The resume token: the data that another frontend needs to continue a broken stream. Opaque to clients; holds no prompt.

Pure. Layout, little-endian:
- 2 bytes mark and version, 16 bytes request id, 8 bytes seed, 2 bytes attempt base.
- 8 bytes digest of all that shapes the output, 1 byte length and the model version.
- From version 3 on: 2 bytes attempt, 1 byte length and the name of the decode replica that runs the attempt.
- From version 3 on: 4 bytes requested output limit, 4 bytes granted output limit.
- From version 4 on: 4 bytes time of issue.
- 16 bytes HMAC-SHA256 over all fields before.
- In a mesh with regions the decode replica is named "region/name".
- Version 5 has, behind the model version: 1 byte length and the pool, 1 byte: 1 if the fields of version 4 follow, else 0.

A token without a location is written in version 2, which every release reads. A token of the pool "default" has no pool.
Only the mesh signs tokens, because a forged token could end another client's stream (decision 0007).
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from itertools import chain
from typing import Final

from kvmesh.pools import DEFAULT_POOL
from services.frontend.requests.takeover import AttemptLocation

ATTEMPT_STRIDE: Final = 256
"""Attempt numbers of one execution are [base + 1, base + ATTEMPT_STRIDE), with base = epoch * ATTEMPT_STRIDE.

The numbers of a later execution are above all numbers of an earlier one. A later attempt therefore supersedes an earlier
one at every process that has both (fencing).
"""

ATTEMPT_BASE_MAX: Final = 65_536 - ATTEMPT_STRIDE

EPOCH_MAX: Final = ATTEMPT_BASE_MAX // ATTEMPT_STRIDE
"""Executions of one request are numbered 0 to EPOCH_MAX."""

_MARK: Final = b"k\x02"
_MARK_LOCATED: Final = b"k\x03"
_MARK_DATED: Final = b"k\x04"
_MARK_POOLED: Final = b"k\x05"
_HEAD: Final = struct.Struct("<2s16sQHQB")
_LOCATION: Final = struct.Struct("<HB")
_OUTPUT: Final = struct.Struct("<II")
_ISSUED: Final = struct.Struct("<I")
_SIGNATURE_BYTES: Final = 16

SECRET_BYTES: Final = 32
"""Length of the mesh's secret."""


TOKEN_BYTES_MAX: Final = (
    _HEAD.size + 255 + 2 + 255 + _LOCATION.size + 255 + _OUTPUT.size + _ISSUED.size + _SIGNATURE_BYTES
)


class ResumeTokenError(ValueError):
    """The bytes are no resume token that this version reads. The text gives the reason without the bytes."""


class Seal:
    """Signs tokens with the mesh's secret, and verifies signatures.

    Key rotation: after a change of the secret the previous one is still accepted, so that running streams can be resumed.
    The secrets of other regions are accepted as well, and sign nothing.
    """

    def __init__(self, secret: bytes) -> None:
        self._secrets: tuple[bytes, ...] = (secret,)
        self._known: dict[str, tuple[bytes, ...]] = {}
        """Secrets of other regions, by region."""

    @property
    def secret(self) -> bytes:
        """Secret that signs new tokens."""
        return self._secrets[0]

    def take(self, secret: bytes) -> bool:
        """Sign with `secret` from now on. Return True if the secret changed."""
        if secret == self.secret:
            return False
        self._secrets = (secret, self.secret)
        return True

    @property
    def known_regions(self) -> int:
        """Number of other regions with tokens that are accepted."""
        return len(self._known)

    def know(self, region: str, secrets: tuple[bytes, ...]) -> None:
        """Accept the tokens of another region from now on. `secrets`: its present one first; they replace earlier ones."""
        self._known[region] = secrets

    def name(self, what: str) -> str:
        """Return 32 lower-case hexadecimal digits for `what`: equal at all frontends, unpredictable without the secret."""
        return hmac.digest(self.secret, b"name\0" + what.encode(), hashlib.sha256)[:16].hex()

    def sign(self, body: bytes) -> bytes:
        """Return `body` with its signature behind it."""
        return body + _signature(self.secret, body)

    def open(self, data: bytes) -> bytes | None:
        """Return the signed bytes, or None if the signature is not the mesh's."""
        body, signature = data[:-_SIGNATURE_BYTES], data[-_SIGNATURE_BYTES:]
        known = (*self._secrets, *chain.from_iterable(self._known.values()))
        found = [hmac.compare_digest(_signature(each, body), signature) for each in known]
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
    """Attempts of the issuing frontend are in [attempt_base + 1, attempt_base + ATTEMPT_STRIDE)."""
    digest: int
    """See validation.digest."""
    model_version: str
    location: AttemptLocation | None = None
    """Location of the running attempt, which this or an earlier execution started. The fields below need a location."""
    asked_output_tokens: int = 0
    """Output limit that the digest covers; 0: not stated."""
    max_output_tokens: int = 0
    """Output limit of the attempt, lower if the deadline left no time for `asked_output_tokens`; 0: not stated."""
    issued_s: int = 0
    """Time of issue in seconds since 1970; 0: not stated."""
    pool: str = ""
    """Pool of the routers and replicas of the request; empty in tokens of version 4 and below."""

    @property
    def epoch(self) -> int:
        """Number of the execution that issued the token."""
        return self.attempt_base // ATTEMPT_STRIDE

    def pack(self, seal: Seal) -> bytes:
        """Return the token as bytes, signed."""
        version, location = self.model_version.encode(), self.location
        pool = b"" if self.pool == DEFAULT_POOL else self.pool.encode()[:255]
        mark = _MARK if location is None else _MARK_DATED if self.issued_s else _MARK_LOCATED
        head = _HEAD.pack(
            _MARK_POOLED if pool else mark,
            bytes.fromhex(self.request_id),
            self.seed,
            self.attempt_base,
            self.digest,
            len(version),
        )
        body = head + version
        if pool:
            body += bytes((len(pool),)) + pool + bytes((location is not None,))
        return seal.sign(body if location is None else body + self._located(location, is_dated=bool(pool)))

    def _located(self, location: AttemptLocation, *, is_dated: bool) -> bytes:
        replica = location.decode_replica.encode()[:255]
        output = _OUTPUT.pack(self.asked_output_tokens, self.max_output_tokens)
        issued = _ISSUED.pack(self.issued_s) if self.issued_s or is_dated else b""
        return _LOCATION.pack(location.attempt, len(replica)) + replica + output + issued


def unpack(data: bytes, seal: Seal) -> ResumeToken:
    """Read a token. Raises ResumeTokenError."""
    if not _HEAD.size + _SIGNATURE_BYTES <= len(data) <= TOKEN_BYTES_MAX:
        raise ResumeTokenError(f"it has {len(data)} bytes")
    mark = data[: len(_MARK)]
    if mark not in (_MARK, _MARK_LOCATED, _MARK_DATED, _MARK_POOLED):
        raise ResumeTokenError("it is of another kind or version")
    body = seal.open(data)
    if body is None:
        raise ResumeTokenError("its signature is not this mesh's")
    _, request_id, seed, base, digest, length = _HEAD.unpack_from(body)
    at = _HEAD.size + length
    try:
        version = body[_HEAD.size : at].decode()
        location, asked, most, issued_s, pool = None, 0, 0, 0, ""
        is_located = mark != _MARK
        if mark == _MARK_POOLED:
            count = body[at]
            pool = body[at + 1 : at + 1 + count].decode()
            at += count + 2
            is_located = body[at - 1] == 1
        if is_located:
            attempt, count = _LOCATION.unpack_from(body, at)
            at += _LOCATION.size + count
            location = AttemptLocation(attempt, body[at - count : at].decode())
            asked, most = _OUTPUT.unpack_from(body, at)
            at += _OUTPUT.size
        if is_located and mark in (_MARK_DATED, _MARK_POOLED):
            (issued_s,) = _ISSUED.unpack_from(body, at)
            at += _ISSUED.size
    except (UnicodeDecodeError, IndexError, struct.error):
        raise ResumeTokenError("its texts cannot be read") from None
    if at != len(body):
        raise ResumeTokenError("its length does not match")
    return ResumeToken(request_id.hex(), seed, base, digest, version, location, asked, most, issued_s, pool)
