"""The rows of a step without PyTorch: where each goes, and which sequences attend together."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engines.reference.arithmetic import ChunkInput
from engines.reference.llama.layout import GROUP_TOKENS_MAX, LIKE, LIKE_TOKENS, StepLayout

BLOCK_TOKENS = 16


def _chunk(start: int, count: int, first_page: int, *, wants: bool = True) -> ChunkInput:
    pages = -(-(start + count) // BLOCK_TOKENS)
    return ChunkInput(
        np.arange(count, dtype=np.int32),
        start,
        np.arange(first_page, first_page + pages, dtype=np.int32),
        wants,
    )


def test_every_row_is_laid_out_once() -> None:
    """Random steps: each row has its page and offset, and is in one prefill or in one group; groups are bounded."""
    for seed in range(60):
        draw = random.Random(seed)
        chunks, page = [], 0
        for _ in range(draw.randrange(1, 40)):
            start = draw.choice((0, draw.randrange(60), draw.randrange(20_000)))
            chunks.append(
                _chunk(start, draw.choice((1, 1, 1, draw.randrange(2, 80))), page, wants=draw.random() < 0.7)
            )
            page += len(chunks[-1].block_ids)
        layout = StepLayout.of(chunks, BLOCK_TOKENS, 1 << 20, 97)
        places = [
            (chunk.block_ids[at // BLOCK_TOKENS], at % BLOCK_TOKENS)
            for chunk in chunks
            for at in range(chunk.start, chunk.start + len(chunk.tokens))
        ]
        assert list(zip(layout.pages, layout.offsets, strict=True)) == places, f"seed={seed}"
        taken = [row for one in layout.prefills for row in range(one.begin, one.end)]
        taken += [row for group in layout.decodes for row in group.rows.tolist()]
        assert sorted(taken) == list(range(len(places))), f"seed={seed}"
        assert len(layout.wanted) == sum(chunk.wants_logits for chunk in chunks)
        for group in layout.decodes:
            least, most = group.lengths.min(), group.lengths.max()
            assert most <= LIKE * least + LIKE_TOKENS
            assert len(group.rows) == 1 or len(group.rows) * most <= GROUP_TOKENS_MAX
            for row, length, ids in zip(group.rows, group.lengths, group.block_ids, strict=True):
                needed = -(-length // BLOCK_TOKENS)
                assert (ids[needed:] == ids[0]).all()
                assert ids[(length - 1) // BLOCK_TOKENS] == layout.pages[row]


@pytest.mark.parametrize(
    ("chunk", "said"),
    [
        (_chunk(90, 20, 0), r"rows \[90, 110\) outside \[0, 100\)"),
        (ChunkInput(np.zeros(0, np.int32), 0, np.zeros(0, np.int32), True), r"rows \[0, 0\) outside"),
        (ChunkInput(np.zeros(3, np.int32), 0, np.zeros(2, np.int32), True), "2 pages of 16 rows for a chunk"),
        (
            ChunkInput(np.array([97], np.int32), 0, np.zeros(1, np.int32), True),
            r"token ids outside \[0, 97\)",
        ),
        (
            ChunkInput(np.array([-1], np.int32), 0, np.zeros(1, np.int32), True),
            r"token ids outside \[0, 97\)",
        ),
    ],
)
def test_inputs_out_of_range_are_refused(chunk: ChunkInput, said: str) -> None:
    """Positions, pages and token ids are checked before anything is computed."""
    with pytest.raises(ValueError, match=said):
        StepLayout.of([chunk], BLOCK_TOKENS, 100, 97)
