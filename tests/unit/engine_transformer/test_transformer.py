"""The NumPy decoder: equal to its formulas, and independent of batch and chunks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engines.reference.arithmetic import Arithmetic, ChunkInput
from engines.reference.transformer import Transformer

BLOCK_TOKENS = 8

TOLERANCE = 1e-6
"""The order of BLAS's additions differs (1e-14), which seldom changes a key's rounding to float32 (1e-8)."""

Row = NDArray[np.float64]


@dataclass
class Run:
    """One sequence: its tokens, the number of computed tokens, its pages."""

    tokens: list[int]
    pages: list[int]
    done: int = 0
    logits: list[Row] = field(default_factory=list)

    def piece(self, count: int) -> ChunkInput:
        """Return the chunk of the next `count` tokens."""
        end = self.done + count
        page_count = -(-end // BLOCK_TOKENS)
        return ChunkInput(
            tokens=np.array(self.tokens[self.done : end], dtype=np.int32),
            start=self.done,
            block_ids=np.array(self.pages[:page_count], dtype=np.int32),
            wants_logits=end == len(self.tokens),
        )


def step(model: Transformer, store: NDArray[Any], parts: list[tuple[Run, int]]) -> None:
    """Compute one step and record the progress."""
    rows = model.forward([run.piece(count) for run, count in parts], store)
    for (run, count), row in zip(parts, rows, strict=True):
        run.done += count
        if row is not None:
            run.logits.append(row)


def recompute(model: Transformer, tokens: list[int]) -> Row:
    """Return the logits after `tokens`, computed at once in a fresh store."""
    page_count = -(-len(tokens) // BLOCK_TOKENS)
    run = Run(tokens, list(range(page_count)))
    step(model, model.new_store(page_count, BLOCK_TOKENS), [(run, len(tokens))])
    return run.logits[-1]


def choose(logits: Row, seed: int | None, position: int) -> int:
    """Return a token: the most likely one, or one drawn by (seed, position) at temperature 1."""
    if seed is None:
        return int(logits.argmax())
    noise = np.random.default_rng((seed, position)).gumbel(size=len(logits))
    return int((logits + noise).argmax())


def histories(model: Transformer, seed: int, lengths: list[int]) -> list[Run]:
    """Return runs of random tokens over disjoint, shuffled pages, with room for 64 more tokens each."""
    generator = np.random.default_rng(seed)
    counts = [-(-(length + 64) // BLOCK_TOKENS) for length in lengths]
    pages = generator.permutation(sum(counts)).tolist()
    runs = []
    for length, count in zip(lengths, counts, strict=True):
        runs.append(Run(generator.integers(0, model.vocab_size, length).tolist(), pages[:count]))
        pages = pages[count:]
    return runs


def store_for(model: Transformer, runs: list[Run]) -> NDArray[Any]:
    """Return a store with room for `runs`, filled with stale content."""
    store = model.new_store(sum(len(run.pages) for run in runs), BLOCK_TOKENS)
    store[...] = 7.0
    return store


def test_satisfies_the_interface(small: Transformer) -> None:
    """A Transformer is an Arithmetic with contiguous float32 pages."""
    arithmetic: Arithmetic = small
    store = arithmetic.new_store(3, BLOCK_TOKENS)
    assert store.shape[0] == 3
    assert store.dtype == np.float32
    assert store[1].flags.c_contiguous
    assert len(store[1].tobytes()) == store.nbytes // 3


def test_matches_the_formulas(small: Transformer, small_weights: dict[str, Row]) -> None:
    """The logits of every row equal those of a naive implementation: norm, rotation, grouped attention, gate, tied
    output.
    """
    (run,) = histories(small, 11, [29])
    expected = naive_logits(small, small_weights, run.tokens)
    store = store_for(small, [run])
    for row in expected:
        (logits,) = small.forward([_demanding(run.piece(1))], store)
        run.done += 1
        assert logits is not None
        np.testing.assert_allclose(logits, row, rtol=0, atol=1e-5)
    np.testing.assert_allclose(recompute(small, run.tokens), expected[-1], rtol=0, atol=1e-5)


def _demanding(piece: ChunkInput) -> ChunkInput:
    return ChunkInput(piece.tokens, piece.start, piece.block_ids, wants_logits=True)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_logits_do_not_depend_on_chunks_or_batch(small: Transformer, data: st.DataObject) -> None:
    """Random schedules of several sequences in any chunks give each sequence the logits that it has alone."""
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=6), label="lengths")
    runs = histories(small, data.draw(st.integers(0, 999), label="seed"), lengths)
    store = store_for(small, runs)
    while left := [run for run in runs if run.done < len(run.tokens)]:
        parts = []
        for run in left:
            count = data.draw(st.sampled_from([100, 64, 7, 2, 1, 1, 0]), label="count")
            count = min(count, len(run.tokens) - run.done)
            if count:
                parts.append((run, count))
        step(small, store, parts)
    for run in runs:
        assert len(run.logits) == 1
        np.testing.assert_allclose(run.logits[0], recompute(small, run.tokens), rtol=0, atol=TOLERANCE)


STEPS = 8
"""Decoded tokens of each run. Three of the runs come into a new page. A recomputation takes a tenth of a second."""


@pytest.mark.parametrize("seed", [None, 3], ids=["greedy", "seeded"])
def test_cached_decode_equals_recomputation(trained: Transformer, seed: int | None) -> None:
    """Batched decode over a paged cache gives the tokens of a full recomputation."""
    runs = histories(trained, 23, [1, 9, 40, 41, 130])
    prompts = [len(run.tokens) for run in runs]
    store = store_for(trained, runs)
    step(trained, store, [(run, len(run.tokens)) for run in runs])
    for _ in range(STEPS):
        for run in runs:
            run.tokens.append(choose(run.logits[-1], seed, len(run.tokens)))
        step(trained, store, [(run, 1) for run in runs])
    for run, prompt in zip(runs, prompts, strict=True):
        tokens = run.tokens[:prompt]
        for _ in range(STEPS):
            tokens.append(choose(recompute(trained, tokens), seed, len(tokens)))
        assert tokens == run.tokens


def test_a_transferred_page_gives_the_same_logits(trained: Transformer) -> None:
    """Pages copied as bytes to another place in another store give exactly the same logits."""
    (run,) = histories(trained, 31, [50])
    store = store_for(trained, [run])
    step(trained, store, [(run, 49)])
    other, pages = trained.new_store(40, BLOCK_TOKENS), [(7 * page) % 40 for page in run.pages]
    for source, target in zip(run.pages, pages, strict=True):
        other[target] = np.frombuffer(store[source].tobytes(), np.float32).reshape(other[target].shape)
    moved = Run(run.tokens, pages, done=49)
    step(trained, store, [(run, 1)])
    step(trained, other, [(moved, 1)])
    assert np.array_equal(run.logits[0], moved.logits[0])


def test_writes_only_its_own_rows(small: Transformer) -> None:
    """A step writes only the rows of its chunks."""
    (run, other) = histories(small, 41, [20, 20])
    store = store_for(small, [run, other])
    before = store.copy()
    step(small, store, [(run, 13)])
    changed = np.argwhere((store != before).any(axis=(1, 3, 4, 5)))
    expected = [(run.pages[at // BLOCK_TOKENS], at % BLOCK_TOKENS) for at in range(13)]
    assert sorted(map(tuple, changed.tolist())) == sorted(expected)


def test_returns_logits_only_if_wanted(small: Transformer) -> None:
    """Rows come in the order of the chunks; None if no logits were wanted."""
    first, second, third = histories(small, 43, [5, 9, 30])
    store = store_for(small, [first, second, third])
    got = small.forward([first.piece(5), second.piece(4), third.piece(30)], store)
    assert got[1] is None
    for run, row in ((first, got[0]), (third, got[2])):
        assert row is not None
        np.testing.assert_allclose(row, recompute(small, run.tokens), rtol=0, atol=TOLERANCE)
    assert small.forward([], store) == []


@pytest.mark.parametrize(
    ("tokens", "start", "pages", "message"),
    [
        ([1, 2], 8, [0], "1 pages of 8 rows for a chunk that ends at row 10"),
        ([1], 3, [0, 1], "2 pages of 8 rows for a chunk that ends at row 4"),
        ([1], 256, list(range(33)), r"rows \[256, 257\) outside \[0, 256\)"),
        ([1], -1, [0], r"rows \[-1, 0\) outside"),
        ([], 0, [], r"rows \[0, 0\) outside"),
        ([97], 0, [0], r"token ids outside \[0, 97\)"),
        ([-1], 0, [0], r"token ids outside \[0, 97\)"),
    ],
)
def test_rejects_chunks_out_of_range(
    small: Transformer, tokens: list[int], start: int, pages: list[int], message: str
) -> None:
    """Wrong positions, pages and ids raise an error that names them, before anything is written."""
    store = small.new_store(33, BLOCK_TOKENS)
    piece = ChunkInput(np.array(tokens, np.int32), start, np.array(pages, np.int32), True)
    with pytest.raises(ValueError, match=message):
        small.forward([piece], store)
    assert not store.any()


def naive_logits(model: Transformer, weights: dict[str, Row], tokens: list[int]) -> list[Row]:
    """Compute the logits of every row with loops over rows, heads and keys; no cache, no pages.

    Written from the formulas, not from the code under test. Keys and values are
    rounded to float32, as the store does.
    """
    shape, half = model.shape, model.shape.head_width // 2
    epsilon = shape.norm_epsilon

    def normalize(row: Row, gain: Row) -> Row:
        normal: Row = row / np.sqrt((row**2).mean() + epsilon) * gain
        return normal

    def turn(head: Row, position: int) -> Row:
        turned = head.copy()
        for i in range(half):
            angle = position * shape.rope_base ** (-i / half)
            pair = complex(head[i], head[i + half]) * complex(np.cos(angle), np.sin(angle))
            turned[i], turned[i + half] = pair.real, pair.imag
        return turned

    rows = [weights["embedding"][token] for token in tokens]
    for layer in range(shape.layer_count):
        own = {name.split(".")[-1]: w for name, w in weights.items() if name.startswith(f"layers.{layer}.")}
        heads = [
            (normalize(row, own["attention_norm"]) @ own["qkv"]).reshape(-1, shape.head_width) for row in rows
        ]
        first_value = shape.head_count + shape.kv_head_count
        following = []
        for at, row in enumerate(rows):
            mixed = []
            for head in range(shape.head_count):
                kv_head = head // shape.group
                query = turn(heads[at][head], at)
                keys = [
                    turn(heads[i][shape.head_count + kv_head], i).astype(np.float32) for i in range(at + 1)
                ]
                scores = np.array([query @ key for key in keys]) / np.sqrt(shape.head_width)
                chances = np.exp(scores - scores.max())
                chances /= chances.sum()
                values = [heads[i][first_value + kv_head].astype(np.float32) for i in range(at + 1)]
                mixed.append(sum(chance * value for chance, value in zip(chances, values, strict=True)))
            attended = row + np.concatenate(mixed) @ own["attention_out"]
            both = normalize(attended, own["feed_forward_norm"]) @ own["gate_up"]
            gate, up = both[: shape.feed_forward_width], both[shape.feed_forward_width :]
            following.append(attended + (gate / (1 + np.exp(-gate)) * up) @ own["feed_forward_out"])
        rows = following
    return [normalize(row, weights["norm"]) @ weights["embedding"].T for row in rows]
