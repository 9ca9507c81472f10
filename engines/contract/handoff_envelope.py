"""The envelope of a handoff blob: magic, version, body in MessagePack, and xxh3_64 of these three. Pure.

The checksum finds accidents, not attacks.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import xxhash

from engines.contract import errors
from engines.contract.errors import EngineError

Body = TypeVar("Body", bound=msgspec.Struct)
_CHECK_BYTES = 8


def sealed(body: msgspec.Struct, magic: bytes, version: int) -> bytes:
    """Return the blob of `body`. `magic`: names the engine kind. `version`: 0..255."""
    blob = magic + bytes([version]) + msgspec.msgpack.encode(body)
    return blob + xxhash.xxh3_64_digest(blob)


def opened(blob: bytes, kind: type[Body], magic: bytes, version: int) -> Body:
    """Return the body of a blob. Raises EngineError with the reason if it is malformed."""
    body, check = blob[:-_CHECK_BYTES], blob[-_CHECK_BYTES:]
    if len(body) < len(magic) + 1 or not body.startswith(magic):
        raise EngineError(errors.HANDOFF_MALFORMED.format(reason="not a handoff of this engine"))
    if body[len(magic)] != version:
        reason = f"version {body[len(magic)]}, this engine reads {version}"
        raise EngineError(errors.HANDOFF_MALFORMED.format(reason=reason))
    if xxhash.xxh3_64_digest(body) != check:
        raise EngineError(errors.HANDOFF_MALFORMED.format(reason="truncated or altered"))
    try:
        return msgspec.msgpack.decode(body[len(magic) + 1 :], type=kind)
    except msgspec.MsgspecError as error:
        raise EngineError(errors.HANDOFF_MALFORMED.format(reason=str(error))) from error
