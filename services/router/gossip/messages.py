"""Gossip messages about dispatches, as bytes in Redis.

Pure. Any bytes decode to a value or raise GossipError. All numbers are little-endian. Times travel as ages at sending,
because the clocks of two hosts are never compared.

    entry       "KVD2" router:text boot:text seq:u64 count:u16 count * message
    dispatched  0x01 request:16 age_us:u64 replica:text prefill_us:u64 tokens:u32 blocks:u32 blocks * hash:u64 precedence
    precedence  is_known:u8 priority_class:u8 is_resumed:u8 priority:i32 weight:f64 size:u16 tenant:size (UTF-8)
    started     0x02 request:16 age_us:u64
    finished    0x03 request:16 has_hit:u8 hit
    hit         cached_tokens:u32 computed_tokens:u32 cached_blocks:u32 prefill_us:u64
    digest      0x04 is_full:u8 replicas:u16 replicas * (replica:text open:u32 open * (request:16 started_age_us:u64))
    repair      0x05 router:text boot:text requests:u16 requests * request:16
    measured    0x06 age_us:u64 replica:text hit
    text        length:u8 UTF-8

`started_age_us` is NOT_STARTED for a prompt that waits. A repair request without requests asks for all of them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvmesh import blocks
from services.router.placement.policy import Dispatched, DispatchEvent, Finished, Hit, Measured, Started
from services.router.placement.precedence import DEFAULT_PRECEDENCE, Precedence

FIELD: Final = b"b"
MESSAGES_MAX: Final = 1024
AGE_MAX_S: Final = 3600.0
"""Bound of ages and estimates: no prompt takes longer."""

NOT_STARTED: Final = (1 << 64) - 1
_MAGIC: Final = b"KVD2"
_HIT: Final = "<IIIQ"
_PRECEDENCE: Final = "<BBBidH"
_U32_MAX: Final = (1 << 32) - 1
_I32_MAX: Final = (1 << 31) - 1
_TENANT_MAX: Final = 1024
"""Bytes of a tenant's name that are sent. The rest of a longer name decides no order."""


class GossipError(ValueError):
    """The bytes are no gossip message; the text says what is wrong."""


@dataclass(frozen=True, slots=True)
class Digest:
    """Anti-entropy digest: all open dispatches of a router."""

    open: Mapping[str, Mapping[str, float | None]]
    """Replica -> request id -> time at which its engine got it; None: it waits."""
    is_full: bool = False
    """True if all open dispatches and the latest measured prompts were sent right before it."""


@dataclass(frozen=True, slots=True)
class RepairRequest:
    """Repair request: asks the process `boot_id` of `router` to send dispatches again."""

    router: str
    boot_id: str
    request_ids: tuple[str, ...] = ()
    """Requests that are missing; empty: all."""


NO_HIT: Final = Hit(0, 0, 0, 0.0)

Message = DispatchEvent | Measured | Digest | RepairRequest


@dataclass(frozen=True, slots=True)
class Entry:
    """Consecutive messages of one router. Their times are of the clock of the process that writes or reads them."""

    router: str
    boot_id: str
    seq: int
    """Ascends by one with each entry of the process."""
    messages: Sequence[Message]


def encode(entry: Entry, now_s: float) -> bytes:
    """Return `entry`, with at most MESSAGES_MAX messages, as bytes to be sent now."""
    parts = [
        *(_MAGIC, _text(entry.router), _text(entry.boot_id)),
        struct.pack("<QH", entry.seq, len(entry.messages)),
    ]
    for message in entry.messages:
        match message:
            case Dispatched():
                parts += [
                    b"\x01",
                    bytes.fromhex(message.request_id),
                    _age(message.at_s, now_s),
                    _text(message.replica),
                ]
                tokens = min(message.token_count, _U32_MAX)
                parts.append(struct.pack("<QII", _us(message.prefill_s), tokens, len(message.hashes)))
                parts += [blocks.pack(message.hashes), _precedence(message.precedence)]
            case Started():
                parts += [b"\x02", bytes.fromhex(message.request_id), _age(message.at_s, now_s)]
            case Finished():
                parts += [b"\x03", bytes.fromhex(message.request_id), bytes((message.hit is not None,))]
                parts.append(_hit(message.hit or NO_HIT))
            case Measured():
                parts += [b"\x06", _age(message.at_s, now_s), _text(message.replica), _hit(message.hit)]
            case Digest():
                parts += [b"\x04", struct.pack("<BH", message.is_full, len(message.open))]
                for replica, prompts in message.open.items():
                    parts += [_text(replica), struct.pack("<I", len(prompts))]
                    for request_id, started_s in prompts.items():
                        parts += [bytes.fromhex(request_id), _age(started_s, now_s)]
            case RepairRequest():
                parts += [b"\x05", _text(message.router), _text(message.boot_id)]
                parts.append(struct.pack("<H", len(message.request_ids)))
                parts += [bytes.fromhex(request_id) for request_id in message.request_ids]
    return b"".join(parts)


def head(router: str) -> bytes:
    """Return the first bytes of each entry of `router`."""
    return _MAGIC + _text(router)


def seq_of(data: bytes, router: str, boot_id: str) -> int | None:
    """Return the number of the entry in `data` if it is of that process, without decoding it."""
    start = head(router) + _text(boot_id)
    if not data.startswith(start) or len(data) < len(start) + 8:
        return None
    return int.from_bytes(data[len(start) : len(start) + 8], "little")


def decode(data: bytes, now_s: float, life_s: float, propagation_s: float = 0.0) -> Entry:
    """Return the entry in `data`, read at `now_s` and sent `propagation_s` before.

    Its dispatches expire `life_s` plus ten times their estimate after `now_s`. Raises GossipError.
    """
    try:
        return _Reader(data, now_s, life_s, propagation_s).entry()
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise GossipError(f"gossip entry of {len(data)} bytes cannot be read: {error}") from None


class _Reader:
    def __init__(self, data: bytes, now_s: float, life_s: float, propagation_s: float) -> None:
        self._data = data
        self._at = 0
        self._now_s = now_s
        self._sent_s = now_s - propagation_s
        self._life_s = life_s

    def entry(self) -> Entry:
        if self._take(4) != _MAGIC:
            raise GossipError(f"gossip entry starts with {self._data[:4]!r}; {_MAGIC!r} is needed")
        router, boot_id = self._text(), self._text()
        seq, count = self._numbers("<QH")
        if count > MESSAGES_MAX:
            raise GossipError(f"gossip entry has {count} messages; up to {MESSAGES_MAX} are allowed")
        messages = [self._message(router) for _ in range(count)]
        if self._at != len(self._data):
            raise GossipError(f"{len(self._data) - self._at} bytes follow the last message")
        return Entry(router, boot_id, seq, messages)

    def _message(self, router: str) -> Message:
        kind = self._take(1)
        if kind == b"\x01":
            return self._dispatched(router)
        if kind == b"\x02":
            return Started(router, self._request(), self._time())
        if kind == b"\x03":
            request_id = self._request()
            (has_hit,) = self._numbers("<B")
            if has_hit > 1:
                raise GossipError(f"has_hit is {has_hit}; 0 or 1 is allowed")
            hit = self._hit()
            return Finished(router, request_id, self._sent_s, hit if has_hit else None)
        if kind == b"\x04":
            return self._digest()
        if kind == b"\x05":
            owner, boot_id = self._text(), self._text()
            return RepairRequest(
                owner, boot_id, tuple(self._request() for _ in range(self._numbers("<H")[0]))
            )
        if kind == b"\x06":
            at_s, replica = self._time(), self._text()
            return Measured(replica, self._hit(), at_s)
        raise GossipError(f"gossip message is of kind {kind!r}; 1 to 6 is allowed")

    def _hit(self) -> Hit:
        cached_tokens, computed_tokens, cached_blocks, prefill_us = self._numbers(_HIT)
        return Hit(cached_tokens, computed_tokens, cached_blocks, min(prefill_us / 1e6, AGE_MAX_S))

    def _dispatched(self, router: str) -> Dispatched:
        request_id, at_s, replica = self._request(), self._time(), self._text()
        prefill_us, tokens, count = self._numbers("<QII")
        prefill_s = min(prefill_us / 1e6, AGE_MAX_S)
        hashes = blocks.unpack(self._take(8 * count))
        expires_s = self._now_s + self._life_s + 10 * prefill_s
        precedence = self._precedence()
        sent = router, request_id, replica, hashes, prefill_s, at_s, expires_s, precedence, tokens
        return Dispatched(*sent, received_s=self._now_s)

    def _precedence(self) -> Precedence | None:
        is_known, priority_class, is_resumed, priority, weight, size = struct.unpack(
            _PRECEDENCE, self._take(struct.calcsize(_PRECEDENCE))
        )
        tenant = self._take(size).decode()
        if not 0 < weight < float("inf"):
            raise GossipError(f"weight is {weight}; more than 0 is needed")
        return Precedence(priority_class, bool(is_resumed), tenant, weight, priority) if is_known else None

    def _digest(self) -> Digest:
        open_: dict[str, Mapping[str, float | None]] = {}
        is_full, count = self._numbers("<BH")
        for _ in range(count):
            replica = self._text()
            prompts: dict[str, float | None] = {}
            (open_count,) = self._numbers("<I")
            for request, age_us in struct.iter_unpack("<16sQ", self._take(24 * open_count)):
                prompts[request.hex()] = None if age_us == NOT_STARTED else self._ago(age_us)
            open_[replica] = prompts
        return Digest(open_, bool(is_full))

    def _request(self) -> str:
        return self._take(16).hex()

    def _time(self) -> float:
        return self._ago(self._numbers("<Q")[0])

    def _ago(self, age_us: int) -> float:
        return self._sent_s - min(age_us / 1e6, AGE_MAX_S)

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise GossipError(f"gossip entry is cut at byte {len(self._data)}")
        part, self._at = self._data[self._at : end], end
        return part

    def _text(self) -> str:
        text = self._take(self._take(1)[0]).decode()
        if not text:
            raise GossipError("a text is empty")
        return text

    def _numbers(self, form: str) -> tuple[int, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form)))


def _hit(hit: Hit) -> bytes:
    counts = (min(each, _U32_MAX) for each in (hit.cached_tokens, hit.computed_tokens, hit.cached_blocks))
    return struct.pack(_HIT, *counts, _us(hit.prefill_s))


def _precedence(precedence: Precedence | None) -> bytes:
    known = precedence or DEFAULT_PRECEDENCE
    tenant = known.tenant.encode()[:_TENANT_MAX].decode(errors="ignore").encode()
    priority = max(-_I32_MAX, min(_I32_MAX, known.priority))
    numbers = struct.pack(
        _PRECEDENCE,
        *(
            precedence is not None,
            known.priority_class,
            known.is_resumed,
            priority,
            known.weight,
            len(tenant),
        ),
    )
    return numbers + tenant


def _age(at_s: float | None, now_s: float) -> bytes:
    return struct.pack("<Q", NOT_STARTED if at_s is None else _us(now_s - at_s))


def _us(seconds: float) -> int:
    return round(min(max(0.0, seconds), AGE_MAX_S) * 1e6)


def _text(text: str) -> bytes:
    data = text.encode()
    if not 1 <= len(data) <= 255:
        raise GossipError(f"text has {len(data)} bytes; 1 to 255 are allowed")
    return bytes((len(data),)) + data
