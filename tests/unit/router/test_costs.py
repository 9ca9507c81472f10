"""The cost model finds an engine's own coefficients from its prefills."""

from __future__ import annotations

import random

import pytest

from services.router.costs import PRIOR, CostModel


@pytest.mark.parametrize(
    ("c0", "a", "b"), [(0.01, 32e-6, 1e-9), (0.002, 1e-3, 0.0), (0.05, 5e-6, 0.0), (0.0005, 20e-6, 5e-9)]
)
def test_the_fit_predicts_an_engine_it_has_watched(c0: float, a: float, b: float) -> None:
    """After some hundred noisy prefills of all lengths, estimates are within 20 % wherever it was watched."""
    rng, model = random.Random(7), CostModel()
    for _ in range(400):
        total = rng.choice((20, 100, 500, 2000, 8000))
        uncached = rng.randint(1, total)
        true_s = c0 + uncached * (a + b * (total - uncached / 2))
        model.observe(uncached, total, true_s * rng.lognormvariate(-0.005, 0.1))
        assert min(model.coefficients) >= 0
    for total in (20, 100, 500, 2000, 8000):
        for uncached in (1, total // 2, total):
            true_s = c0 + uncached * (a + b * (total - uncached / 2))
            assert model.estimate_s(uncached, total) == pytest.approx(true_s, rel=0.2)


def test_it_follows_an_engine_that_changes() -> None:
    """After an engine became four times slower, some hundred prefills later the estimates are, too."""
    rng, model = random.Random(1), CostModel()
    for factor in (1, 4):
        for _ in range(900):
            uncached = rng.randint(1, 2000)
            model.observe(uncached, uncached, factor * (0.01 + uncached * 1e-4))
        assert model.estimate_s(1000, 1000) == pytest.approx(factor * 0.11, rel=0.1)


def test_before_the_first_observation_the_prior_counts() -> None:
    """Estimates are finite, positive and grow with the uncached tokens from the start, and after absurd observations."""
    model = CostModel()
    assert model.coefficients == PRIOR
    for seconds in (0.0, 1e9, 1e-12):
        model.observe(0, 0, seconds)
        assert 0 <= model.estimate_s(0, 0) <= model.estimate_s(10, 100) < float("inf")
