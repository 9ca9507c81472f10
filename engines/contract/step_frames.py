"""Step frames: the outputs of many requests in one response, as packed little-endian columns. Pure.

The layout is in engines/reference/README.md. `kvmesh/triton/step_frames.py` is the decoder. Both change together, with
VERSION.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from engines.contract.outputs import RequestOutput

VERSION: Final = 1
"""Version of the layout, and the value of the model's parameter `step_frames`."""

ROWS_MAX: Final = 65_536
"""Most rows of one kind in a frame, and so the most open slots of one step stream."""

LAST: Final = 1
"""Flag of a frame: the last one of its step-stream request."""
ALTERNATIVES: Final = 2
"""Flag of a frame: it has the column of alternatives."""
HAS_LOG_PROBS: Final = 1
"""Flag of a row of tokens."""
COMPLETE: Final = 1
"""Flag of a final row: the output is complete."""

HEADER: Final = struct.Struct("<BBHQIIIII")
"""Version, flags, 0, number of the frame; counts of token rows, tokens, first rows, final rows, error rows."""


@dataclass(slots=True)
class SlotProgress:
    """What was sent of one slot. `position`: number of tokens that earlier frames had."""

    slot: int
    has_log_probs: bool = False
    has_perf: bool = False
    position: int = 0
    is_started: bool = False


def encode(
    number: int, outputs: Iterable[tuple[SlotProgress, RequestOutput]], *, is_last: bool = False
) -> bytes:
    """Return frame `number` with the outputs of at most ROWS_MAX slots, each slot once; advances their progress."""
    slots: list[int] = []
    positions: list[int] = []
    counts: list[int] = []
    ids: list[int] = []
    flags = bytearray()
    widths = bytearray()
    log_probs: list[float] = []
    top_ids: list[int] = []
    top_log_probs: list[float] = []
    first: list[tuple[int, int, bytes]] = []
    final: list[tuple[int, int]] = []
    errors: list[tuple[int, bytes]] = []
    for progress, output in outputs:
        slot = progress.slot
        tokens = output.tokens
        if not progress.is_started and (tokens or output.is_complete):
            progress.is_started = True
            reused = output.perf.reused_blocks if progress.has_perf and output.perf is not None else 0
            first.append((slot, reused, output.handoff or b""))
        if tokens:
            slots.append(slot)
            positions.append(progress.position)
            counts.append(len(tokens))
            progress.position += len(tokens)
            ids += tokens
            flags.append(HAS_LOG_PROBS if progress.has_log_probs else 0)
            if progress.has_log_probs:
                log_probs += output.log_probs
            widths.append(len(output.top_ids[0]) if output.top_ids else 0)
            if output.top_ids:
                for row_ids, row_values in zip(output.top_ids, output.top_log_probs, strict=True):
                    top_ids += row_ids
                    top_log_probs += row_values
        if output.error is not None:
            errors.append((slot, output.error.encode()))
        elif output.is_final:
            final.append((slot, COMPLETE if output.is_complete else 0))
    has_alternatives = bool(top_ids)
    frame_flags = (LAST if is_last else 0) | (ALTERNATIVES if has_alternatives else 0)
    rows = len(slots)
    parts: list[bytes | bytearray] = [
        HEADER.pack(VERSION, frame_flags, 0, number, rows, len(ids), len(first), len(final), len(errors)),
        struct.pack(f"<{3 * rows}I", *slots, *positions, *counts),
        struct.pack(f"<{len(ids)}i", *ids),
        flags,
        struct.pack(f"<{len(log_probs)}f", *log_probs),
    ]
    if has_alternatives:
        parts += [widths, _pairs(top_ids, top_log_probs)]
    if first:
        parts.append(
            struct.pack(f"<{2 * len(first)}I", *(row[0] for row in first), *(row[1] for row in first))
        )
        parts.append(_texts([row[2] for row in first]))
    if final:
        parts.append(struct.pack(f"<{len(final)}I", *(row[0] for row in final)))
        parts.append(bytes(row[1] for row in final))
    if errors:
        parts.append(struct.pack(f"<{len(errors)}I", *(row[0] for row in errors)))
        parts.append(_texts([row[1] for row in errors]))
    return b"".join(parts)


def _texts(texts: list[bytes]) -> bytes:
    """Return the lengths of `texts`, then the texts."""
    return struct.pack(f"<{len(texts)}I", *map(len, texts)) + b"".join(texts)


def _pairs(ids: list[int], log_probs: list[float]) -> bytes:
    """Return pairs of id and log-probability."""
    words = np.empty((len(ids), 2), "<u4")
    words[:, 0] = np.array(ids, "<i4").view("<u4")
    words[:, 1] = np.array(log_probs, "<f4").view("<u4")
    return words.tobytes()
