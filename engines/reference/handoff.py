"""The handoff: what a context_only answer gives to whoever will generate, and the table of blocks held for it.

The blob is opaque to everyone but engines of the same build. No sockets here.
"""

import threading
from dataclasses import dataclass, field

import msgspec
import xxhash

from engines.reference import errors
from engines.reference.errors import EngineError

_MAGIC = b"KVMH"
_VERSION = 1
_CHECK_BYTES = 8


class Handoff(msgspec.Struct, frozen=True, array_like=True):
    """What the decode side must know to continue: where the KV is, which, and whether it fits this engine."""

    boot_id: str  # of the prefill engine
    handoff_id: int  # unique within that boot
    address: str  # "host:port" of its KV listener
    first_tokens: list[int]  # made by prefill; exactly one today
    first_log_probs: list[float]  # theirs; 0.0 unless the context_only request asked for them
    token_count: int  # prompt tokens whose KV is held
    block_tokens: int
    block_hashes: list[int]  # of the full blocks of the prompt
    tail_hash: int  # of the tokens after them, chained
    block_bytes: int
    digest: str  # of the arithmetic (weights or salt, dtype, vocabulary)

    def encode(self) -> bytes:
        """Magic, version, body, xxh3_64 of all that."""
        body = _MAGIC + bytes([_VERSION]) + msgspec.msgpack.encode(self)
        return body + xxhash.xxh3_64_digest(body)


def decode(blob: bytes) -> Handoff:
    """Read a blob; EngineError says what is wrong with it."""
    body, check = blob[:-_CHECK_BYTES], blob[-_CHECK_BYTES:]
    if len(body) < len(_MAGIC) + 1 or not body.startswith(_MAGIC):
        raise EngineError(errors.HANDOFF_MALFORMED.format(reason="not a handoff of this engine"))
    if body[len(_MAGIC)] != _VERSION:
        reason = f"version {body[len(_MAGIC)]}, this engine reads {_VERSION}"
        raise EngineError(errors.HANDOFF_MALFORMED.format(reason=reason))
    if xxhash.xxh3_64_digest(body) != check:
        raise EngineError(errors.HANDOFF_MALFORMED.format(reason="truncated or altered"))
    try:
        return msgspec.msgpack.decode(body[len(_MAGIC) + 1 :], type=Handoff)
    except msgspec.MsgspecError as error:
        raise EngineError(errors.HANDOFF_MALFORMED.format(reason=str(error))) from error


@dataclass(slots=True)
class HeldHandoff:
    """Blocks kept for a handoff. State: held -> sending -> (held again | gone)."""

    handoff_id: int
    block_ids: list[int]
    expires_s: float
    request_id: str = ""  # Triton's, of the call that made it
    is_sending: bool = False
    is_release_pending: bool = False  # released or expired while sending: goes when the send ends


@dataclass(slots=True)
class HandoffTable:
    """Which blocks are held for which handoff; the one structure the engine thread shares with the KV listener.

    Only the engine thread frees blocks: every method that ends a handoff returns the blocks to free, or None
    if there is nothing to free now.
    """

    _held: dict[int, HeldHandoff] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hold(self, handoff_id: int, block_ids: list[int], expires_s: float, request_id: str = "") -> None:
        """Keep `block_ids` until released, sent and acknowledged, or expired."""
        with self._lock:
            self._held[handoff_id] = HeldHandoff(handoff_id, block_ids, expires_s, request_id)

    def begin_send(self, handoff_id: int) -> list[int] | None:
        """Blocks to send, kept until `end_send`; None if unknown, being sent already, or on its way out."""
        with self._lock:
            held = self._held.get(handoff_id)
            if held is None or held.is_sending or held.is_release_pending:
                return None
            held.is_sending = True
            return list(held.block_ids)

    def end_send(self, handoff_id: int, *, is_acknowledged: bool) -> list[int] | None:
        """A send is over; an unacknowledged handoff is held again until it expires."""
        with self._lock:
            held = self._held.get(handoff_id)
            if held is None:
                return None
            held.is_sending = False
            if not is_acknowledged and not held.is_release_pending:
                return None
            return self._held.pop(handoff_id).block_ids

    def release(self, handoff_id: int) -> list[int] | None:
        """Give a handoff up; unknown ids are fine."""
        with self._lock:
            return self._end(handoff_id)

    def release_of_request(self, request_id: str) -> list[list[int]]:
        """Give up what the calls with this Triton id made: whoever stops a call may never have had its answer."""
        with self._lock:
            made = [held.handoff_id for held in self._held.values() if held.request_id == request_id]
            ended = [self._end(handoff_id) for handoff_id in made]
            return [block_ids for block_ids in ended if block_ids is not None]

    def expire(self, now_s: float) -> list[list[int]]:
        """Give up all handoffs past their time."""
        with self._lock:
            late = [
                held.handoff_id
                for held in self._held.values()
                if held.expires_s <= now_s and not held.is_release_pending
            ]
            ended = [self._end(handoff_id) for handoff_id in late]
            return [block_ids for block_ids in ended if block_ids is not None]

    def next_expiry_s(self) -> float | None:
        """When the next handoff expires, None if none is held."""
        with self._lock:
            return min(
                (held.expires_s for held in self._held.values() if not held.is_release_pending), default=None
            )

    def held(self) -> tuple[int, int]:
        """(handoffs, blocks counted once per handoff) still held, sends in progress included."""
        with self._lock:
            return len(self._held), sum(len(held.block_ids) for held in self._held.values())

    def _end(self, handoff_id: int) -> list[int] | None:
        held = self._held.get(handoff_id)
        if held is None:
            return None
        if held.is_sending:
            held.is_release_pending = True
            return None
        return self._held.pop(handoff_id).block_ids
