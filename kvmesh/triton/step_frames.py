"""Decoder of the engine's step frames. Pure.

The layout is in engines/reference/README.md. A frame that breaks it raises EngineError. Rows are checked by `step_slots`,
each against the state of its slot.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from kvmesh.triton.errors import EngineError

OUTPUT: Final = "step_frame"
"""Output tensor of a model with step frames."""

VERSION: Final = 1
"""Version of the layout that this release reads, as the model's parameter `step_frames` tells it."""

ROWS_MAX: Final = 65_536
"""Most rows of one kind in a frame."""

FIRST_NUMBER: Final = 1
"""Number of the first frame of a step stream."""

LAST: Final = 1
ALTERNATIVES: Final = 2
HAS_LOG_PROBS: Final = 1
COMPLETE: Final = 1
HEADER: Final = struct.Struct("<BBHQIIIII")
PAIR_BYTES: Final = 8
"""Bytes of one alternative: id and log-probability."""


class TokenRow(NamedTuple):
    """Tokens of one slot: positions [position, position + len(token_ids))."""

    slot: int
    position: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Parallel to the tokens, or empty."""
    alternatives: bytes
    """Pairs of id and log-probability, equally many for each token, or empty."""


class FirstRow(NamedTuple):
    """The data that an engine sends once for a slot."""

    slot: int
    reused_blocks: int
    handoff: bytes


class FinalRow(NamedTuple):
    """The end of a slot. `is_complete`: False for an output that ended early."""

    slot: int
    is_complete: bool


class ErrorRow(NamedTuple):
    """The failure of a slot, with the engine's text."""

    slot: int
    text: str


class StepFrame(NamedTuple):
    """One decoded frame. `is_last`: no later frame comes by its step-stream request."""

    number: int
    is_last: bool
    first: list[FirstRow]
    tokens: list[TokenRow]
    final: list[FinalRow]
    errors: list[ErrorRow]


class _Reader:
    """Takes columns from the front of a frame. Raises EngineError with the missing bytes."""

    __slots__ = ("_at", "_frame")

    def __init__(self, frame: bytes, at: int) -> None:
        self._frame = frame
        self._at = at

    def column(self, name: str, count: int, kind: str) -> tuple[int, ...]:
        """Return `count` numbers of four bytes; `kind`: their struct format."""
        at = self._at
        self._skip(name, 4 * count)
        return struct.unpack_from(f"<{count}{kind}", self._frame, at)

    def floats(self, name: str, count: int) -> tuple[float, ...]:
        at = self._at
        self._skip(name, 4 * count)
        return struct.unpack_from(f"<{count}f", self._frame, at)

    def raw(self, name: str, size: int) -> bytes:
        """Return `size` bytes."""
        at = self._at
        self._skip(name, size)
        return self._frame[at : self._at]

    def texts(self, name: str, count: int) -> list[bytes]:
        """Return `count` byte strings behind the column of their lengths."""
        return [self.raw(name, size) for size in self.column(f"{name} lengths", count, "I")]

    def end(self) -> None:
        """Raise EngineError if bytes are left."""
        left = len(self._frame) - self._at
        if left:
            raise EngineError(f"step frame has {left} bytes behind its last row: allowed are 0")

    def _skip(self, name: str, size: int) -> None:
        left = len(self._frame) - self._at
        if size > left:
            raise EngineError(f"step frame is cut: {name} needs {size} bytes, and {left} are left")
        self._at += size


def decode(frame: bytes) -> StepFrame:
    """Return the rows of `frame`. Raises EngineError with the field, its value and the allowed range."""
    if len(frame) < HEADER.size:
        raise EngineError(f"step frame has {len(frame)} bytes: allowed are {HEADER.size} or more")
    version, flags, reserved, number, rows, tokens, firsts, finals, errors = HEADER.unpack_from(frame)
    if version != VERSION:
        raise EngineError(f"step frame has version {version}: allowed is {VERSION}")
    if flags & ~(LAST | ALTERNATIVES) or reserved:
        raise EngineError(
            f"step frame has flags {flags:#x} and reserved bits {reserved:#x}: unknown bits are 0"
        )
    for name, count in (("token", rows), ("first", firsts), ("final", finals), ("error", errors)):
        if count > ROWS_MAX:
            raise EngineError(f"step frame has {count} {name} rows: allowed are 0..{ROWS_MAX}")
    reader = _Reader(frame, HEADER.size)
    token_rows = _token_rows(reader, rows, tokens, has_alternatives=bool(flags & ALTERNATIVES))
    first_rows: list[FirstRow] = []
    final_rows: list[FinalRow] = []
    error_rows: list[ErrorRow] = []
    if firsts:
        slots, reused = reader.column("first slots", firsts, "I"), reader.column("reused blocks", firsts, "I")
        first_rows = list(map(FirstRow, slots, reused, reader.texts("handoff", firsts)))
    if finals:
        slots, ends = reader.column("final slots", finals, "I"), reader.raw("final flags", finals)
        final_rows = [FinalRow(slot, bool(end & COMPLETE)) for slot, end in zip(slots, ends, strict=True)]
    if errors:
        slots = reader.column("error slots", errors, "I")
        texts = (text.decode(errors="replace") for text in reader.texts("error text", errors))
        error_rows = list(map(ErrorRow, slots, texts))
    reader.end()
    return StepFrame(number, bool(flags & LAST), first_rows, token_rows, final_rows, error_rows)


def _token_rows(reader: _Reader, rows: int, tokens: int, *, has_alternatives: bool) -> list[TokenRow]:
    slots = reader.column("slots", rows, "I")
    positions = reader.column("positions", rows, "I")
    counts = reader.column("counts", rows, "I")
    total = sum(counts)
    if total != tokens:
        raise EngineError(f"step frame has counts for {total} tokens: allowed is {tokens}, as in its header")
    ids = reader.column("token ids", tokens, "i")
    flags = reader.raw("row flags", rows)
    has_log_probs = any(flags)
    log_probs: tuple[float, ...] = ()
    if has_log_probs:
        asked = sum(count for count, flag in zip(counts, flags, strict=True) if flag & HAS_LOG_PROBS)
        log_probs = reader.floats("log-probabilities", asked)
    widths = alternatives = b""
    if has_alternatives:
        widths = reader.raw("alternative counts", rows)
        pairs = sum(count * width for count, width in zip(counts, widths, strict=True))
        alternatives = reader.raw("alternatives", pairs * PAIR_BYTES)
    elif not has_log_probs and total == rows and (not rows or min(counts) == 1):  # most frames
        return [
            TokenRow(slot, position, (token,), (), b"")
            for slot, position, token in zip(slots, positions, ids, strict=True)
        ]
    found: list[TokenRow] = []
    at = at_log_prob = at_pair = 0
    for index, count in enumerate(counts):
        own: tuple[float, ...] = ()
        if flags[index] & HAS_LOG_PROBS:
            own = log_probs[at_log_prob : at_log_prob + count]
            at_log_prob += count
        size = PAIR_BYTES * count * widths[index] if widths else 0
        row_alternatives = alternatives[at_pair : at_pair + size]
        at_pair += size
        found.append(TokenRow(slots[index], positions[index], ids[at : at + count], own, row_alternatives))
        at += count
    return found
