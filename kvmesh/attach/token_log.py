"""Append-only log of a slot's output tokens, sent up to the end of the reader's flow-control window.

Pure. The log keeps 4 bytes per token (8 with log-probabilities) until the slot is forgotten. So a new stream can take the
slot over (stream takeover) from any position.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from kvmesh.attach import frames

_NO_ALTERNATIVE = frames.pack_alternatives((-1,), (float("nan"),))


class Gap(Exception):
    """Tokens are missing between the receiver's position and the received row. The attempt has failed."""


class Chunk(NamedTuple):
    """Tokens of one slot that may be sent: positions [position, position + len(token_ids) / 4)."""

    position: int
    token_ids: bytes
    logprobs: bytes
    alternatives: bytes = b""


class TokenLog:
    """Output of one attempt: positions [start, end), of which [start, sent) was sent.

    `credit`: the end of the flow-control window.

    INVARIANT: start <= sent <= min(end, max(credit, start)) between two takeovers.
    """

    __slots__ = ("_alternative_bytes", "_alternatives", "_ids", "_logprobs", "credit", "sent", "start")

    def __init__(
        self, start: int, credit: int, *, with_logprobs: bool = False, alternatives: int = 0
    ) -> None:
        """`alternatives`: most likely tokens that are kept beside each token."""
        self.start = start
        self.credit = credit
        self.sent = start
        self._ids = array("i")
        self._logprobs = array("f") if with_logprobs else None
        self._alternatives = bytearray()
        self._alternative_bytes = alternatives * frames.PAIR_BYTES
        """Bytes for each token."""

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + len(self._ids)

    @property
    def last_id(self) -> int | None:
        """The last token, or None for an empty log."""
        return self._ids[-1] if self._ids else None

    @property
    def size_bytes(self) -> int:
        """Bytes that the log keeps."""
        return len(self._ids) * (4 if self._logprobs is None else 8) + len(self._alternatives)

    def append(self, ids: Sequence[int], logprobs: Sequence[float] = (), alternatives: bytes = b"") -> None:
        """Add tokens at the end. Missing log-probabilities are NaN. Missing alternatives are id -1."""
        self._ids.extend(ids)
        if self._alternative_bytes:
            size = len(ids) * self._alternative_bytes
            missing = _NO_ALTERNATIVE * ((size - len(alternatives)) // frames.PAIR_BYTES)
            self._alternatives += alternatives[:size] + missing
        if self._logprobs is not None:
            self._logprobs.extend(logprobs if len(logprobs) == len(ids) else [float("nan")] * len(ids))

    def grant(self, position: int) -> bool:
        """Raise the end of the window to `position`. Return True if it grew. A lower value is ignored."""
        if position <= self.credit:
            return False
        self.credit = position
        return True

    def is_blocked(self) -> bool:
        """True if tokens wait for the window: the reader is slower than the engine (backpressure)."""
        return self.end > self.sent >= self.credit

    def is_drained(self) -> bool:
        """True if all tokens were sent."""
        return self.sent == self.end

    def take(self) -> Chunk | None:
        """Return the unsent tokens inside the window, and count them as sent."""
        until = min(self.end, self.credit)
        if self.sent >= until:
            return None
        low, high = self.sent - self.start, until - self.start
        chunk = Chunk(
            self.sent,
            frames.pack_ids(self._ids[low:high]),
            b"" if self._logprobs is None else frames.pack_logprobs(self._logprobs[low:high]),
            bytes(self._alternatives[low * self._alternative_bytes : high * self._alternative_bytes]),
        )
        self.sent = until
        return chunk

    def rewind(self, position: int, credit: int) -> None:
        """Continue from `position` for a new reader with the window end `credit`. The log must hold `position`."""
        self.sent = position
        self.credit = credit


def admit(row: frames.Row, next_position: int) -> frames.Row | None:
    """Return the part of `row` from `next_position` on, or None. The receiver has all tokens below that position.

    Raises Gap if tokens are missing between `next_position` and the row.
    """
    position = row.position
    if position == next_position:
        return row
    if position > next_position:
        raise Gap(f"the receiver has {next_position} tokens; the row starts at position {position}")
    known = next_position - position
    if known >= row.count:
        return None
    at = known * frames.TOKEN_BYTES
    beside = known * (len(row.alternatives) // row.count)
    ids, logprobs, alternatives = row.token_ids[at:], row.logprobs[at:], row.alternatives[beside:]
    return frames.Row(row.slot, next_position, row.count - known, ids, logprobs, alternatives)
