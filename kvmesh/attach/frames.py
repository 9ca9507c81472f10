"""Step frames: many slots' tokens as packed columns, and the rules a received frame must obey.

Pure. Tokens stay bytes here (32-bit little-endian): a relay never looks at them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvmesh.attach.v1 import attach_pb2 as pb

TOKEN_BYTES = 4
ROWS_MAX = 65_536
"""Rows in one frame. Far above what a step makes; a frame beyond it is a peer gone wrong."""


class FrameError(ValueError):
    """A message breaks the protocol: names the field, the value and what is allowed. The stream must end."""


class Row(NamedTuple):
    """Tokens of one slot: positions [position, position + count)."""

    slot: int
    position: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls on a row
    token_ids: bytes
    """`4 * count` bytes."""
    logprobs: bytes
    """`4 * count` bytes, or empty if no slot of the frame asked."""


def rows(frame: pb.StepFrame) -> Iterator[Row]:
    """Yield the rows of `frame` in order. Raises FrameError before the first row if the columns disagree."""
    slots, positions, counts = frame.slots, frame.positions, frame.counts
    length = len(slots)
    if length > ROWS_MAX:
        raise FrameError(f"frame.slots has {length} rows; at most {ROWS_MAX} are allowed")
    if len(positions) != length or len(counts) != length:
        raise FrameError(
            f"frame columns differ in length: slots {length}, positions {len(positions)}, counts {len(counts)}"
        )
    tokens, logprobs = frame.token_ids, frame.logprobs
    total = sum(counts) * TOKEN_BYTES
    if len(tokens) != total:
        raise FrameError(f"frame.token_ids has {len(tokens)} bytes; counts ask for {total}")
    if logprobs and len(logprobs) != total:
        raise FrameError(f"frame.logprobs has {len(logprobs)} bytes; counts ask for {total}, or none")
    if length and min(counts) < 1:
        raise FrameError("frame.counts holds 0; a row has at least 1 token")
    return _split(slots, positions, counts, tokens, logprobs)


def _split(
    slots: Sequence[int], positions: Sequence[int], counts: Sequence[int], tokens: bytes, logprobs: bytes
) -> Iterator[Row]:
    at = 0
    for slot, position, count in zip(slots, positions, counts, strict=True):
        end = at + count * TOKEN_BYTES
        yield Row(slot, position, count, tokens[at:end], logprobs[at:end])
        at = end


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as 32-bit little-endian bytes. Raises FrameError for an id outside 32 bits."""
    try:
        return struct.pack(f"<{len(ids)}i", *ids)
    except struct.error as error:
        raise FrameError(f"token ids must fit 32 bits: {error}") from None


def unpack_ids(data: bytes) -> tuple[int, ...]:
    """Return the token ids in `data`. Raises FrameError if its length is no multiple of 4."""
    if len(data) % TOKEN_BYTES:
        raise FrameError(f"token_ids has {len(data)} bytes; a multiple of {TOKEN_BYTES} is needed")
    return struct.unpack(f"<{len(data) // TOKEN_BYTES}i", data)


def pack_logprobs(values: Sequence[float]) -> bytes:
    """Return log-probabilities as 32-bit little-endian floats."""
    return struct.pack(f"<{len(values)}f", *values)


def unpack_logprobs(data: bytes) -> tuple[float, ...]:
    """Return the log-probabilities in `data`. Raises FrameError if its length is no multiple of 4."""
    if len(data) % 4:
        raise FrameError(f"logprobs has {len(data)} bytes; a multiple of 4 is needed")
    return struct.unpack(f"<{len(data) // 4}f", data)


def check_submit(submit: pb.Submit, *, last_slot: int) -> None:
    """Raise FrameError if `submit` breaks the protocol itself (not merely its range for one replica)."""
    check_slot(submit.slot, last_slot)
    check_request_id(submit.request_id)
    if not 1 <= submit.attempt <= 65_535:
        raise FrameError(f"submit.attempt is {submit.attempt}; 1 to 65535 is allowed")
    if not submit.token_ids or len(submit.token_ids) % TOKEN_BYTES:
        raise FrameError(
            f"submit.token_ids has {len(submit.token_ids)} bytes; a positive multiple of 4 is needed"
        )
    if not submit.HasField("budget") or not submit.HasField("sampling"):
        raise FrameError("submit.budget and submit.sampling must be present")
    tokens = len(submit.token_ids) // TOKEN_BYTES
    if submit.start_position >= tokens:
        raise FrameError(
            f"submit.start_position is {submit.start_position}; below {tokens} tokens is allowed"
        )
    if not 1 <= submit.block_tokens <= 1024:
        raise FrameError(f"submit.block_tokens is {submit.block_tokens}; 1 to 1024 is allowed")
    blocks = tokens // submit.block_tokens
    if len(submit.block_hashes) != 8 * blocks:
        raise FrameError(
            f"submit.block_hashes has {len(submit.block_hashes)} bytes; {blocks} blocks need {8 * blocks}"
        )


def check_adopt(adopt: pb.Adopt, *, last_slot: int) -> None:
    """Raise FrameError if `adopt` breaks the protocol."""
    check_slot(adopt.slot, last_slot)
    check_request_id(adopt.request_id)


def check_slot(slot: int, last_slot: int) -> None:
    """Raise FrameError unless `slot` is new: slots ascend within a stream and are never reused."""
    if slot <= last_slot:
        raise FrameError(
            f"slot is {slot}; above {last_slot} is needed, slots are never used twice in a stream"
        )


def check_request_id(request_id: str) -> None:
    """Raise FrameError unless `request_id` is 32 lower-case hexadecimal digits."""
    if len(request_id) != 32 or not set(request_id) <= _HEX:
        raise FrameError(f"request_id is {request_id[:40]!r}; 32 lower-case hexadecimal digits are needed")


_HEX = frozenset("0123456789abcdef")
