"""The cost model finds an engine's own coefficients from its prefills."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from services.router.placement.cost_model import B_PER_A_MAX, PRIOR, CostModel


@pytest.mark.parametrize(
    ("c0", "a", "b"), [(0.01, 32e-6, 1e-9), (0.002, 1e-3, 0.0), (0.05, 5e-6, 0.0), (0.0005, 20e-6, 5e-9)]
)
def test_the_fit_predicts_an_engine_it_has_watched(c0: float, a: float, b: float) -> None:
    """After some hundred noisy prefills of all lengths, estimates are within 20 % in the observed range."""
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


@pytest.mark.parametrize("seed", range(6))
def test_outliers_do_not_bend_the_fit(seed: int) -> None:
    """Random coefficients, 10 % noise, and one prefill in twenty of 3 to 100 times the seconds: still within 15 %."""
    rng, model = random.Random(seed), CostModel()
    c0 = 10 ** rng.uniform(-3, -1)
    a = 10 ** rng.uniform(-5.5, -3.5)
    b = rng.choice((0.0, 10 ** rng.uniform(-10, -8.5)))
    for index in range(600):
        total = round(10 ** rng.uniform(1.5, 4.5))
        uncached = rng.randint(1, total)
        seconds = (c0 + uncached * (a + b * (total - uncached / 2))) * rng.lognormvariate(-0.005, 0.1)
        if index % 20 == 7:
            seconds *= rng.uniform(3, 100)
        model.observe(uncached, total, seconds)
    errors = []
    for _ in range(200):
        total = round(10 ** rng.uniform(1.5, 4.5))
        uncached = rng.randint(1, total)
        true_s = c0 + uncached * (a + b * (total - uncached / 2))
        errors.append(abs(model.estimate_s(uncached, total) / true_s - 1))
    assert max(errors) < 0.15, (c0, a, b, model.coefficients)


def test_one_stall_moves_nothing() -> None:
    """A single value, 100 times too long, changes no estimate by more than some per cent at any later fit."""
    rng, model = random.Random(3), CostModel()
    for _ in range(128):
        uncached = rng.randint(10, 4000)
        model.observe(uncached, uncached, 0.01 + uncached * 1e-4)
    before_s = model.estimate_s(1000, 1000)
    model.observe(1000, 1000, 100 * before_s)
    for _ in range(31):
        model.observe(1000, 1000, before_s)
    assert model.estimate_s(1000, 1000) == pytest.approx(before_s, rel=0.02)


def test_rare_long_prompts_are_learnt_although_all_others_are_short() -> None:
    """Observations far from wrong estimates are not outliers: the estimates approach them fit by fit."""
    rng, model = random.Random(5), CostModel()
    for index in range(1500):
        uncached = 20_000 if index % 50 == 0 else rng.randint(5, 50)
        model.observe(uncached, uncached, 0.01 + uncached * 5e-4)
    assert model.estimate_s(20_000, 20_000) == pytest.approx(10.01, rel=0.1)


def test_it_follows_an_engine_that_changes() -> None:
    """Some hundred prefills after an engine became four times slower, the estimates are four times as long."""
    rng, model = random.Random(1), CostModel()
    for factor in (1, 4):
        for _ in range(900):
            uncached = rng.randint(1, 2000)
            model.observe(uncached, uncached, factor * (0.01 + uncached * 1e-4))
        assert model.estimate_s(1000, 1000) == pytest.approx(factor * 0.11, rel=0.1)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("exponents", [(1, 1, 2), (0, 1.5, 0), (-1, -1, 0), (0.5, 0.5, -2)])
def test_an_engine_far_from_the_prior_is_learnt_as_it_is(exponents: Sequence[float], seed: int) -> None:
    """Each coefficient times ten to its exponent, no noise: within 3 % amid the window, and 10 % at its ends."""
    rng, model = random.Random(seed), CostModel()
    c0, a, b = (nominal * 10**exponent for nominal, exponent in zip(PRIOR, exponents, strict=True))

    def true_s(tokens: int) -> float:
        return c0 + tokens * (a + b * tokens / 2)

    for _ in range(256):
        tokens = round(64 * 64 ** rng.random())
        model.observe(tokens, tokens, true_s(tokens))
    for tokens, near in ((64, 0.1), (256, 0.03), (1024, 0.03), (4096, 0.1)):
        assert model.estimate_s(tokens, tokens) == pytest.approx(true_s(tokens), rel=near), tokens


@pytest.mark.parametrize("seed", range(8))
def test_a_floor_below_short_prompts_is_not_taken_for_attention(seed: int) -> None:
    """A GPU takes as long for 1 token as for 300. Short prompts alone do not make the estimates of long ones far longer."""
    rng, model = random.Random(seed), CostModel()

    def true_s(tokens: int) -> float:
        return max(0.0065, 19e-6 * tokens) + 0.4e-9 * tokens * tokens

    for _ in range(256):
        tokens = round(16 * 128 ** rng.random())
        model.observe(tokens, tokens, true_s(tokens))
    for tokens, most in ((4096, 1.4), (8192, 1.8), (16384, 2.7)):
        assert 0.8 < model.estimate_s(tokens, tokens) / true_s(tokens) < most, (tokens, model.coefficients)


def test_the_bound_limits_the_fit_of_narrow_layers() -> None:
    """In layers narrower than some 300 channels, a pair of tokens costs more beside a token than the bound allows."""
    model, a, b = CostModel(), 1e-4, 1e-7
    for tokens in [*range(100, 2000, 50)] * 4:
        model.observe(tokens, tokens, 0.01 + tokens * (a + b * tokens / 2))
    _, found, pairs = model.coefficients
    assert pairs <= B_PER_A_MAX * found
    for tokens in (200, 1000, 1900):
        assert model.estimate_s(tokens, tokens) == pytest.approx(
            0.01 + tokens * (a + b * tokens / 2), rel=0.35
        )


@pytest.mark.parametrize("seed", range(8))
def test_nonsense_is_forgotten(seed: int) -> None:
    """A window of absurd prefills bends all estimates; two windows later they are as before."""
    rng, model = random.Random(seed), CostModel()
    for _ in range(128):
        total = rng.choice((1, 10, 10_000, 10_000_000))
        model.observe(rng.choice((0, 1, total)), total, 10 ** rng.uniform(-9, 4))
    for _ in range(256):
        tokens = round(100 * 40 ** rng.random())
        model.observe(tokens, tokens, 0.02 + tokens * 1e-4)
    for tokens in (100, 700, 4000):
        assert model.estimate_s(tokens, tokens) == pytest.approx(0.02 + tokens * 1e-4, rel=0.05)


def test_before_the_first_observation_the_prior_counts() -> None:
    """Estimates are finite, positive and grow with the uncached tokens from the start, and after absurd observations."""
    model = CostModel()
    assert model.coefficients == PRIOR
    for seconds in (0.0, 1e9, 1e-12):
        model.observe(0, 0, seconds)
        assert 0 <= model.estimate_s(0, 0) <= model.estimate_s(10, 100) < float("inf")
