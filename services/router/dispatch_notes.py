"""What routers tell each other about their dispatches, as bytes in Redis.

Pure. Any bytes decode to a value or raise NoteError. All numbers are little-endian.

    notes       "KVD1" router:text boot:text count:u16 count * note
    dispatched  0x01 request:16 replica:text prefill_us:u64 blocks:u32 blocks * hash:u64
    started     0x02 request:16
    finished    0x03 request:16 has_hit:u8 cached_blocks:u32
    text        length:u8 UTF-8
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvmesh import blocks
from services.router.holdings import Note
from services.router.policy import Dispatched, Finished, Hit, Started

FIELD: Final = b"b"
NOTES_MAX: Final = 1024
_MAGIC: Final = b"KVD1"


class NoteError(ValueError):
    """The bytes are no notes of ours; says what is wrong."""


@dataclass(frozen=True, slots=True)
class Notes:
    """Some consecutive notes of one router. Times in them are of the reader's clock, at the moment of reading."""

    router: str
    boot_id: str
    notes: Sequence[Note]


def encode(router: str, boot_id: str, notes: Sequence[Note]) -> bytes:
    """Return at most NOTES_MAX `notes` as bytes."""
    parts = [_MAGIC, _text(router), _text(boot_id), struct.pack("<H", len(notes))]
    for note in notes:
        request = bytes.fromhex(note.request_id)
        if isinstance(note, Dispatched):
            parts += [
                b"\x01",
                request,
                _text(note.replica),
                struct.pack("<QI", round(note.prefill_s * 1e6), len(note.hashes)),
                blocks.pack(note.hashes),
            ]
        elif isinstance(note, Started):
            parts += [b"\x02", request]
        else:
            hit = note.hit
            parts += [b"\x03", request, struct.pack("<BI", hit is not None, hit.cached_blocks if hit else 0)]
    return b"".join(parts)


def decode(data: bytes, now_s: float, life_s: float) -> Notes:
    """Return the notes in `data`, as seen at `now_s`; dispatches are forgotten `life_s` later. Raises NoteError."""
    try:
        return _Reader(data).notes(now_s, life_s)
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise NoteError(f"notes of {len(data)} bytes cannot be read: {error}") from None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def notes(self, now_s: float, life_s: float) -> Notes:
        if self._take(4) != _MAGIC:
            raise NoteError(f"notes start with {self._data[:4]!r}; {_MAGIC!r} is needed")
        router, boot_id = self._text(), self._text()
        (count,) = self._numbers("<H")
        if count > NOTES_MAX:
            raise NoteError(f"{count} notes; {NOTES_MAX} are allowed")
        notes = [self._note(router, now_s, life_s) for _ in range(count)]
        if self._at != len(self._data):
            raise NoteError(f"{len(self._data) - self._at} bytes follow the notes")
        return Notes(router, boot_id, notes)

    def _note(self, router: str, now_s: float, life_s: float) -> Note:
        kind = self._take(1)
        request_id = self._take(16).hex()
        if kind == b"\x01":
            replica = self._text()
            prefill_us, count = self._numbers("<QI")
            prefill_s = min(prefill_us / 1e6, 3600.0)
            hashes = blocks.unpack(self._take(8 * count))
            expires_s = now_s + life_s + 10 * prefill_s
            return Dispatched(router, request_id, replica, hashes, prefill_s, now_s, expires_s)
        if kind == b"\x02":
            return Started(router, request_id, now_s)
        if kind != b"\x03":
            raise NoteError(f"note is of kind {kind!r}; 1 to 3 is allowed")
        has_hit, cached_blocks = self._numbers("<BI")
        if has_hit > 1:
            raise NoteError(f"has_hit is {has_hit}; 0 or 1 is allowed")
        hit = Hit(0, 0, cached_blocks, 0.0) if has_hit else None
        return Finished(router, request_id, now_s, hit)

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise NoteError(f"notes are cut at byte {len(self._data)}")
        part, self._at = self._data[self._at : end], end
        return part

    def _text(self) -> str:
        text = self._take(self._take(1)[0]).decode()
        if not text:
            raise NoteError("a text is empty")
        return text

    def _numbers(self, form: str) -> tuple[int, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form)))


def _text(text: str) -> bytes:
    data = text.encode()
    if not 1 <= len(data) <= 255:
        raise NoteError(f"text has {len(data)} bytes; 1 to 255 are allowed")
    return bytes((len(data),)) + data
