"""Step frames: the tokens of many slots as packed columns, and the rules that a received frame must obey.

Pure. Tokens stay bytes (32-bit little-endian), because a router forwards them without parsing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvmesh.attach.v1 import attach_pb2 as pb

TOKEN_BYTES = 4
PAIR_BYTES = 8
"""Bytes of one alternative: an id and its log-probability."""
ALTERNATIVES_MAX = 20
"""Most alternatives for each token."""
_PAIR = struct.Struct("<if")
ROWS_MAX = 65_536
"""Most rows of one frame, far more than a step makes. A larger frame shows a broken peer."""


class FrameError(ValueError):
    """A message breaks the protocol. The text names the field, the value and the allowed range. The stream must end."""


class Row(NamedTuple):
    """Tokens of one slot: positions [position, position + count)."""

    slot: int
    position: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not called on rows
    token_ids: bytes
    """`4 * count` bytes."""
    logprobs: bytes
    """`4 * count` bytes, or empty if no slot of the frame has log-probabilities."""
    alternatives: bytes = b""
    """Pairs of id and log-probability, equally many for each token; empty for a slot without the option."""


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
    if not frame.alternatives:
        return _split(slots, positions, counts, tokens, logprobs)
    per_token = frame.alternative_counts
    if len(per_token) != length or max(per_token, default=0) > ALTERNATIVES_MAX:
        raise FrameError(
            f"frame.alternative_counts has {len(per_token)} numbers up to {max(per_token, default=0)}; "
            f"{length} up to {ALTERNATIVES_MAX} are needed"
        )
    size = sum(count * each for count, each in zip(counts, per_token, strict=True)) * PAIR_BYTES
    if len(frame.alternatives) != size:
        raise FrameError(f"frame.alternatives has {len(frame.alternatives)} bytes; counts ask for {size}")
    return _with_alternatives(_split(slots, positions, counts, tokens, logprobs), frame)


def _split(
    slots: Sequence[int], positions: Sequence[int], counts: Sequence[int], tokens: bytes, logprobs: bytes
) -> Iterator[Row]:
    at = 0
    for slot, position, count in zip(slots, positions, counts, strict=True):
        end = at + count * TOKEN_BYTES
        yield Row(slot, position, count, tokens[at:end], logprobs[at:end])
        at = end


def _with_alternatives(bare: Iterator[Row], frame: pb.StepFrame) -> Iterator[Row]:
    at = 0
    for row, per_token in zip(bare, frame.alternative_counts, strict=True):
        end = at + row.count * per_token * PAIR_BYTES
        yield row._replace(alternatives=frame.alternatives[at:end])
        at = end


def end_token_ids(submit: pb.Submit) -> frozenset[int]:
    """Return the ids of the tokens that end the output of `submit`."""
    return frozenset(ordered_end_token_ids(submit))


def ordered_end_token_ids(submit: pb.Submit) -> tuple[int, ...]:
    """Return the same ids, `end_token_id` first."""
    first = () if submit.end_token_id < 0 else (submit.end_token_id,)
    return (*first, *submit.further_end_token_ids)


def pack_alternatives(ids: Sequence[int], logprobs: Sequence[float]) -> bytes:
    """Return pairs of id and log-probability as bytes."""
    return b"".join(_PAIR.pack(*pair) for pair in zip(ids, logprobs, strict=True))


def unpack_alternatives(data: bytes) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return ids and log-probabilities of the pairs in `data`. Raises FrameError if its length is no multiple of 8."""
    if len(data) % PAIR_BYTES:
        raise FrameError(f"alternatives has {len(data)} bytes; a multiple of {PAIR_BYTES} is needed")
    pairs = list(_PAIR.iter_unpack(data))
    return tuple(each for each, _ in pairs), tuple(value for _, value in pairs)


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
