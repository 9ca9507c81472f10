"""Paged attention: causal for prefill rows, grouped and padded for decode rows.

All functions are pure functions of arrays. Pages are float32, all other arrays float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

PREFILL_TILE_ROWS = 64
"""Rows of one sequence in one tile; the score matrix has at most this many rows per head, one column per key."""

DECODE_GROUP_TOKENS = 4096
"""Keys, padding included, that one group of decode sequences copies from its pages: 4 MiB in float64."""

Rows = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode sequences of similar length, one row each, padded to the longest."""

    rows: Integers
    block_ids: Integers
    """Pages, [sequence, page]. A shorter sequence is padded with its first page."""
    bias: Rows
    """Added to the scores: 0 within a sequence, -inf for padding. [sequence, 1, 1, key]."""

    @classmethod
    def over(cls, singles: list[tuple[int, int, Integers]], block_tokens: int) -> list[DecodeGroup]:
        """Group (length, row, pages) by length, with little padding and at most DECODE_GROUP_TOKENS keys a group."""
        groups: list[list[tuple[int, int, Integers]]] = []
        for single in sorted(singles, key=lambda single: single[0]):
            length = single[0]
            is_like = bool(groups) and length <= 1.25 * groups[-1][0][0] + 32
            if is_like and (len(groups[-1]) + 1) * length <= DECODE_GROUP_TOKENS:
                groups[-1].append(single)
            else:
                groups.append([single])
        return [cls._of(group, block_tokens) for group in groups]

    @classmethod
    def _of(cls, singles: list[tuple[int, int, Integers]], block_tokens: int) -> DecodeGroup:
        page_count = -(-singles[-1][0] // block_tokens)
        block_ids = np.stack(
            [np.concatenate([ids, np.full(page_count - len(ids), ids[0])]) for _, _, ids in singles]
        )
        lengths = np.array([length for length, _, _ in singles])
        is_behind = np.arange(page_count * block_tokens) >= lengths[:, None]
        bias = np.where(is_behind, -np.inf, 0.0)[:, None, None, :]
        return cls(np.array([row for _, row, _ in singles]), block_ids, bias)

    def attend(self, query: Rows, pages: NDArray[np.float32]) -> Rows:
        kept = gathered(pages, self.block_ids)
        scores = query @ kept[:, :, 0].transpose(0, 2, 3, 1)
        scores += self.bias
        return cast(Rows, _softmax(scores) @ kept[:, :, 1].transpose(0, 2, 1, 3))


def attend_causal(query: Rows, start: int, kept: Rows) -> Rows:
    """Compute causal attention of rows `[start, start + n)` of one sequence over rows `[0, start + n)`.

    `query` is [n, kv head, group, head width], scaled. `kept` is [at least start + n, key or value, kv head, head
    width]. The result has the shape of `query`. The rows are processed in tiles of PREFILL_TILE_ROWS; a tile reads
    only the keys up to its last row.
    """
    count, kv_heads, group, head_width = query.shape
    mixed = np.empty_like(query)
    for first in range(0, count, PREFILL_TILE_ROWS):
        last = min(first + PREFILL_TILE_ROWS, count)
        tile = query[first:last].transpose(1, 0, 2, 3).reshape(kv_heads, -1, head_width)
        seen = kept[: start + last]
        scores = (tile @ seen[:, 0].transpose(1, 2, 0)).reshape(kv_heads, last - first, group, start + last)
        future = np.triu(np.full((last - first, last - first), -np.inf), 1)
        scores[..., start + first :] += future[:, None, :]
        weights = _softmax(scores).reshape(kv_heads, -1, start + last)
        out = (weights @ seen[:, 1].transpose(1, 0, 2)).reshape(kv_heads, last - first, group, head_width)
        mixed[first:last] = out.transpose(1, 0, 2, 3)
    return mixed


def gathered(pages: NDArray[np.float32], block_ids: Integers) -> Rows:
    """Copy pages [sequence, page] into float64 rows [sequence, row, key or value, kv head, head width]."""
    kept = pages[block_ids]
    return kept.reshape(len(block_ids), -1, *kept.shape[3:]).astype(np.float64)


def _softmax(scores: Rows) -> Rows:
    """Turn scores into weights along the last axis, in place."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores
