"""Speed factors of single replicas."""

from __future__ import annotations

import random

import pytest

from services.router.placement.speeds import Speeds


def test_a_slow_replica_is_noticed_and_the_others_are_not_blamed() -> None:
    """One of four is 2.5 times as slow, with noise and stalls. Its factor follows after 100 prompts; forgotten, it is 1."""
    rng, speeds = random.Random(2), Speeds()
    for _ in range(100):
        for name, factor in (("p0", 1.0), ("p1", 1.0), ("p2", 2.5), ("p3", 1.0)):
            seconds = factor * rng.lognormvariate(0, 0.1) * (100 if rng.random() < 0.05 else 1)
            speeds.observe(name, 1.0, seconds)
    assert speeds.factor("p2") == pytest.approx(2.5, rel=0.15)
    assert all(speeds.factor(name) == pytest.approx(1.0, rel=0.1) for name in ("p0", "p1", "p3"))
    speeds.forget("p2")
    assert speeds.factor("p2") == 1.0


def test_a_common_error_belongs_to_the_pool() -> None:
    """Estimates that are wrong for all replicas, or for the only one, are corrected in the pool's costs."""
    speeds = Speeds()
    for _ in range(200):
        for name in ("p0", "p1", "p2"):
            speeds.observe(name, 1.0, 3.0)
    assert all(speeds.factor(name) == pytest.approx(1.0, rel=0.05) for name in ("p0", "p1", "p2"))
    alone = Speeds()
    for _ in range(50):
        alone.observe("p0", 1.0, 7.0)
        assert alone.factor("p0") == pytest.approx(1.0)


def test_one_outlier_moves_little() -> None:
    """One prompt of 100 times the seconds makes no replica slow, nor do small differences; bad input is ignored."""
    speeds = Speeds()
    for _ in range(50):
        speeds.observe("p0", 1.0, 1.0)
        speeds.observe("p1", 1.0, 1.05)
    for seconds in (100.0, 0.0, -1.0):
        speeds.observe("p0", 1.0, seconds)
    speeds.observe("p0", 0.0, 1.0)
    assert speeds.factor("p0") == speeds.factor("p1") == 1.0


def observe(speeds: Speeds, rng: random.Random, sigma: float, slowness: float) -> None:
    """Let each of eight replicas take one prompt, p0 `slowness` times as long as the others; noise is lognormal."""
    for index in range(8):
        factor = slowness if index == 0 else 1.0
        speeds.observe(f"p{index}", 1.0, factor * rng.lognormvariate(-sigma * sigma / 2, sigma))


@pytest.mark.parametrize("sigma", [0.1, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_a_factor_converges_to_the_truth_through_noise(sigma: float, seed: int) -> None:
    """One of eight is twice as slow: its factor, over prompts 3,000 to 4,000, is 2.0 within 3 %; equals stay equal."""
    rng, speeds = random.Random(seed), Speeds()
    factors, alike, asked = [], 0, 0
    for prompt in range(4000):
        observe(speeds, rng, sigma, 2.0)
        if prompt >= 3000:
            factors.append(speeds.factor("p0"))
            alike += sum(speeds.factor(f"p{index}") == 1.0 for index in range(1, 8))
            asked += 7
    assert sum(factors) / len(factors) == pytest.approx(2.0, rel=0.03)
    assert alike >= 0.95 * asked, "chance makes one of equal replicas the first choice"


@pytest.mark.parametrize(("sigma", "prompts"), [(0.1, 100), (0.5, 200)])
def test_a_change_is_followed_however_much_was_seen_before(sigma: float, prompts: int) -> None:
    """A replica that was twice as slow for 3,000 prompts, and then is not, is like the others after some tens."""
    rng, speeds = random.Random(5), Speeds()
    for _ in range(3000):
        observe(speeds, rng, sigma, 2.0)
    for _ in range(prompts):
        observe(speeds, rng, sigma, 1.0)
    assert speeds.factor("p0") < 1.15
