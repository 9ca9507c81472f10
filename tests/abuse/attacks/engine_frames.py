"""Lies of an engine in its step frames: each makes the payloads that are sent in place of an honest frame."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from kvmesh.triton import step_frames
from kvmesh.triton.step_frames import StepFrame
from tests.unit.triton.slow_frames import Frame, Tokens, encoded

HONEST_TOKENS: Final = 2
"""Correct tokens of a call before it is corrupted in its middle."""

FrameLie = Callable[[Frame], list[bytes]]
"""Changes the rows of a frame, and returns the payloads to send."""


def twin_of(found: StepFrame) -> Frame:
    """Return the rows of a frame, to be changed."""
    rows = []
    for row in found.tokens:
        pairs = list(struct.iter_unpack("<if", row.alternatives))
        width = len(pairs) // len(row.token_ids)
        beside = [pairs[at : at + width] for at in range(0, len(pairs), width or 1)]
        rows.append(Tokens(row.slot, row.position, list(row.token_ids), list(row.log_probs) or None, beside))
    return Frame(
        found.number,
        found.is_last,
        rows,
        [(row.slot, row.reused_blocks, row.handoff) for row in found.first],
        [(row.slot, row.is_complete) for row in found.final],
        [(row.slot, row.text) for row in found.errors],
    )


def with_ids(change: Callable[[list[int]], list[int]]) -> FrameLie:
    """Return a lie that changes all tokens."""

    def lie(frame: Frame) -> list[bytes]:
        for row in frame.tokens:
            row.ids, row.log_probs, row.alternatives = change(row.ids), None, []
        return [encoded(frame)]

    return lie


def torn(frame: Frame) -> list[bytes]:
    """Cut the frame."""
    return [encoded(frame)[:-3]]


def other_version(frame: Frame) -> list[bytes]:
    """Name another version."""
    return [b"\x63" + encoded(frame)[1:]]


def twice(frame: Frame) -> list[bytes]:
    """Send the last rows twice, and each frame again."""
    frame.final += frame.final
    return [encoded(frame)] * 2


def gap(frame: Frame) -> list[bytes]:
    """Leave a token out."""
    for row in frame.tokens:
        row.position += row.position >= HONEST_TOKENS
    return [encoded(frame)]


def refused(frame: Frame) -> list[bytes]:
    """Refuse each call in its middle."""
    late = _late(frame)
    frame.errors += [(slot, "Invalid value for input_ids: a lie; allowed: none") for slot in late]
    return [encoded(frame)]


def unfinished(frame: Frame) -> list[bytes]:
    """End each call in its middle as if it were complete."""
    frame.final += [(slot, True) for slot in _late(frame)]
    return [encoded(frame)]


def silent(frame: Frame) -> list[bytes]:
    """Send nothing of a call behind its middle."""
    _late(frame)
    return [encoded(frame)]


def _late(frame: Frame) -> list[int]:
    """Take out the rows of calls behind their middle, and return their slots."""
    late = [row.slot for row in frame.tokens if row.position >= HONEST_TOKENS]
    frame.tokens = [row for row in frame.tokens if row.slot not in late]
    frame.final = [row for row in frame.final if row[0] not in late]
    return late


def lied(payload: bytes, lie: FrameLie) -> list[bytes]:
    """Return what is sent in place of an honest frame. A frame without tokens stays."""
    found = step_frames.decode(payload)
    return lie(twin_of(found)) if found.tokens else [payload]
