"""The rows of one step: positions, pages, and groups of sequences that attention takes together. Pure.

The rows of all chunks go through the matrices together. A chunk of several rows has an attention of its own. Chunks of
one row, which are those of decode, form groups of similar length that are padded to the longest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engines.reference.arithmetic import ChunkInput

GROUP_TOKENS_MAX: Final = 131_072
"""Keys, padding included, that one group copies from its pages: 512 MiB per layer with the shape 8B in bf16."""
LIKE: Final = 1.5
"""A group's longest sequence is at most this many times its shortest one, plus LIKE_TOKENS."""
LIKE_TOKENS: Final = 256

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The rows `[begin, end)` of a step: a chunk of one sequence that begins at position `start`."""

    begin: int
    end: int
    start: int
    block_ids: Integers


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """One row of each of several sequences."""

    rows: Integers
    lengths: Integers
    """Keys of each sequence, its new row included, [sequence]."""
    block_ids: Integers
    """[sequence, page]. A shorter sequence is padded with its first page."""


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The layout of a step, shared by all layers."""

    tokens: Integers
    positions: Integers
    pages: Integers
    offsets: Integers
    prefills: tuple[PrefillRows, ...]
    decodes: tuple[DecodeRows, ...]
    wanted: Integers
    """Rows whose logits are wanted, in the order of their chunks."""

    @classmethod
    def of(
        cls, chunks: list[ChunkInput], block_tokens: int, positions_max: int, vocabulary: int
    ) -> StepLayout:
        """Lay the chunks out. Raises ValueError if pages, positions or token ids are out of range."""
        for chunk in chunks:
            _check(chunk, block_tokens, positions_max)
        tokens = np.concatenate([chunk.tokens for chunk in chunks]).astype(np.int64)
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            raise ValueError(f"token ids outside [0, {vocabulary})")
        ends = np.cumsum([len(chunk.tokens) for chunk in chunks])
        positions = [np.arange(chunk.start, chunk.start + len(chunk.tokens)) for chunk in chunks]
        pages = [chunk.block_ids[at // block_tokens] for chunk, at in zip(chunks, positions, strict=True)]
        everywhere = np.concatenate(positions)
        placed = list(zip(chunks, ends.tolist(), strict=True))
        return cls(
            tokens=tokens,
            positions=everywhere,
            pages=np.concatenate(pages).astype(np.int64),
            offsets=everywhere % block_tokens,
            prefills=tuple(
                PrefillRows(end - len(chunk.tokens), end, chunk.start, chunk.block_ids.astype(np.int64))
                for chunk, end in placed
                if len(chunk.tokens) > 1
            ),
            decodes=tuple(
                _grouped([(chunk, end - 1) for chunk, end in placed if len(chunk.tokens) == 1], block_tokens)
            ),
            wanted=np.array([end - 1 for chunk, end in placed if chunk.wants_logits], dtype=np.int64),
        )


def _grouped(singles: list[tuple[ChunkInput, int]], block_tokens: int) -> list[DecodeRows]:
    groups: list[list[tuple[ChunkInput, int]]] = []
    for single in sorted(singles, key=lambda single: single[0].start):
        length = single[0].start + 1
        is_like = bool(groups) and length <= LIKE * (groups[-1][0][0].start + 1) + LIKE_TOKENS
        if is_like and (len(groups[-1]) + 1) * length <= GROUP_TOKENS_MAX:
            groups[-1].append(single)
        else:
            groups.append([single])
    return [_group(group, block_tokens) for group in groups]


def _group(singles: list[tuple[ChunkInput, int]], block_tokens: int) -> DecodeRows:
    page_count = -(-(singles[-1][0].start + 1) // block_tokens)
    block_ids = np.empty((len(singles), page_count), dtype=np.int64)
    for row, (chunk, _) in zip(block_ids, singles, strict=True):
        row[: len(chunk.block_ids)] = chunk.block_ids
        row[len(chunk.block_ids) :] = chunk.block_ids[0]
    return DecodeRows(
        rows=np.array([row for _, row in singles], dtype=np.int64),
        lengths=np.array([chunk.start + 1 for chunk, _ in singles], dtype=np.int64),
        block_ids=block_ids,
    )


def _check(chunk: ChunkInput, block_tokens: int, positions_max: int) -> None:
    end = chunk.start + len(chunk.tokens)
    if len(chunk.tokens) < 1 or chunk.start < 0 or end > positions_max:
        raise ValueError(f"rows [{chunk.start}, {end}) outside [0, {positions_max})")
    if len(chunk.block_ids) != -(-end // block_tokens):
        raise ValueError(
            f"{len(chunk.block_ids)} pages of {block_tokens} rows for a chunk that ends at row {end}"
        )
