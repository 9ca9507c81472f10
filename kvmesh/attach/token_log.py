"""A slot's append-only log of output tokens, sent up to the credited position.

Pure. The log keeps 4 bytes per token (8 with log-probabilities) until the slot is forgotten, so that a new stream can
adopt the slot from any position it names.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from kvmesh.attach import frames


class Gap(Exception):
    """Tokens are missing between what a receiver has and what it was sent: the attempt has failed."""


class Chunk(NamedTuple):
    """Tokens of one slot that may be sent: positions [position, position + len(token_ids) / 4)."""

    position: int
    token_ids: bytes
    logprobs: bytes


class TokenLog:
    """Output of one attempt: positions [start, end), of which [start, sent) was sent.

    Invariant: start <= sent <= min(end, max(credit, start)) between two takeovers.
    """

    __slots__ = ("_ids", "_logprobs", "credit", "sent", "start")

    def __init__(self, start: int, credit: int, *, with_logprobs: bool = False) -> None:
        self.start = start
        self.credit = credit
        self.sent = start
        self._ids = array("i")
        self._logprobs = array("f") if with_logprobs else None

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + len(self._ids)

    @property
    def last_id(self) -> int | None:
        """The last token, or None while there is none."""
        return self._ids[-1] if self._ids else None

    @property
    def size_bytes(self) -> int:
        """Bytes the log keeps."""
        return len(self._ids) * (4 if self._logprobs is None else 8)

    def append(self, ids: Sequence[int], logprobs: Sequence[float] = ()) -> None:
        """Add tokens at the end; missing log-probabilities are NaN."""
        self._ids.extend(ids)
        if self._logprobs is not None:
            self._logprobs.extend(logprobs if len(logprobs) == len(ids) else [float("nan")] * len(ids))

    def grant(self, position: int) -> bool:
        """Raise the credit to `position`. Return True if it grew; a lower value is ignored."""
        if position <= self.credit:
            return False
        self.credit = position
        return True

    def is_blocked(self) -> bool:
        """True if tokens wait for credit: the reader is slower than the engine."""
        return self.end > self.sent >= self.credit

    def is_drained(self) -> bool:
        """True if everything was sent."""
        return self.sent == self.end

    def take(self) -> Chunk | None:
        """Return the credited tokens that were not sent, and count them as sent."""
        until = min(self.end, self.credit)
        if self.sent >= until:
            return None
        low, high = self.sent - self.start, until - self.start
        chunk = Chunk(
            self.sent,
            frames.pack_ids(self._ids[low:high]),
            b"" if self._logprobs is None else frames.pack_logprobs(self._logprobs[low:high]),
        )
        self.sent = until
        return chunk

    def rewind(self, position: int, credit: int) -> None:
        """Go on from `position`, which a reader can have, for a new reader with `credit`."""
        self.sent = position
        self.credit = credit


def admit(row: frames.Row, next_position: int) -> frames.Row | None:
    """Return the part of `row` a receiver that has everything below `next_position` lacks, or None.

    Raises Gap if tokens are missing between the two.
    """
    position = row.position
    if position == next_position:
        return row
    if position > next_position:
        raise Gap(f"have {next_position} tokens, got position {position}")
    known = next_position - position
    if known >= row.count:
        return None
    at = known * frames.TOKEN_BYTES
    return frames.Row(row.slot, next_position, row.count - known, row.token_ids[at:], row.logprobs[at:])
