"""The hashed arithmetic: logits depend on the history only, and different histories have different logits."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engines.reference.arithmetic import ChunkInput
from engines.reference.hashed import HashedArithmetic

_WIDTH = 8


def _run(
    arithmetic: HashedArithmetic,
    tokens: npt.NDArray[Any],
    cuts: list[int],
    pages: npt.NDArray[Any],
    store: npt.NDArray[Any],
) -> npt.NDArray[Any]:
    """Compute `tokens` in chunks that end at `cuts`; return the logits of the last token."""
    start = 0
    for end in cuts:
        piece = ChunkInput(tokens[start:end], start, pages[: -(-end // _WIDTH)], end == cuts[-1])
        (logits,) = arithmetic.forward([piece], store)
        start = end
    assert logits is not None
    return logits


@pytest.mark.parametrize("seed", range(20))
def test_logits_do_not_depend_on_splits_or_pages(seed: int) -> None:
    """Chunks, pages and stale content of the store do not change the logits."""
    rng = np.random.default_rng(seed)
    arithmetic = HashedArithmetic(salt="s")
    tokens = rng.integers(0, 4096, int(rng.integers(1, 60)), dtype=np.int32)
    one, other = arithmetic.new_store(16, _WIDTH), arithmetic.new_store(16, _WIDTH)
    other[:] = rng.integers(0, 2**63, other.shape, dtype=np.uint64)
    whole = _run(arithmetic, tokens, [len(tokens)], np.arange(16, dtype=np.int32), one)
    cuts = sorted({*rng.integers(1, len(tokens) + 1, 4).tolist(), len(tokens)})
    split = _run(arithmetic, tokens, cuts, rng.permutation(16).astype(np.int32), other)
    assert np.array_equal(whole, split), f"seed={seed}"


def test_a_wrong_block_anywhere_changes_the_logits() -> None:
    """A changed block changes the logits even if the running hash no longer reads it."""
    arithmetic = HashedArithmetic()
    tokens, pages = np.arange(40, dtype=np.int32), np.arange(8, dtype=np.int32)
    store = arithmetic.new_store(8, _WIDTH)
    right = _run(arithmetic, tokens, [39, 40], pages, store)
    store[1, 3] += np.uint64(1)
    (wrong,) = arithmetic.forward([ChunkInput(tokens[39:], 39, pages[:5], True)], store)
    assert wrong is not None and not np.array_equal(right, wrong)


def test_salt_is_another_model() -> None:
    """Two versions differ for every history."""
    tokens, pages = np.arange(5, dtype=np.int32), np.arange(1, dtype=np.int32)
    results = []
    for salt in ("1", "2"):
        arithmetic = HashedArithmetic(salt=salt)
        results.append(_run(arithmetic, tokens, [5], pages, arithmetic.new_store(1, _WIDTH)))
    assert results[0].argmax() != results[1].argmax()


@pytest.mark.parametrize(("probability", "low", "high"), [(0.0, 0, 0), (0.25, 60, 140), (1.0, 400, 400)])
def test_end_token_comes_as_often_as_asked(probability: float, low: int, high: int) -> None:
    """The option sets the chance per position; zero means never."""
    arithmetic = HashedArithmetic(end_token=2, end_probability=probability)
    pages, ends = np.arange(1, dtype=np.int32), 0
    for token in range(400):
        store = arithmetic.new_store(1, _WIDTH)
        logits = _run(arithmetic, np.array([token], dtype=np.int32), [1], pages, store)
        ends += int(logits.argmax()) == 2
    assert low <= ends <= high
