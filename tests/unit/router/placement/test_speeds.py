"""What one replica is slower by than the others."""

from __future__ import annotations

import random

import pytest

from services.router.placement.speeds import Speeds


def test_a_slow_replica_is_noticed_and_the_others_are_not_blamed() -> None:
    """One of four is 2.5 times as slow, with noise and stalls: its factor says so after 100 prompts; forgotten, it is 1."""
    rng, speeds = random.Random(2), Speeds()
    for _ in range(100):
        for name, factor in (("p0", 1.0), ("p1", 1.0), ("p2", 2.5), ("p3", 1.0)):
            seconds = factor * rng.lognormvariate(0, 0.1) * (100 if rng.random() < 0.05 else 1)
            speeds.observe(name, 1.0, seconds)
    assert speeds.factor("p2") == pytest.approx(2.5, rel=0.15)
    assert all(speeds.factor(name) == pytest.approx(1.0, rel=0.1) for name in ("p0", "p1", "p3"))
    speeds.forget("p2")
    assert speeds.factor("p2") == 1.0


def test_what_all_have_in_common_is_nobodys() -> None:
    """Estimates that are wrong for everybody, or for the only one, are the pool's to correct."""
    speeds = Speeds()
    for _ in range(200):
        for name in ("p0", "p1", "p2"):
            speeds.observe(name, 1.0, 3.0)
    assert all(speeds.factor(name) == pytest.approx(1.0, rel=0.05) for name in ("p0", "p1", "p2"))
    alone = Speeds()
    for _ in range(50):
        alone.observe("p0", 1.0, 7.0)
        assert alone.factor("p0") == pytest.approx(1.0)


def test_one_wild_value_moves_little() -> None:
    """A prompt that took 100 times as long makes nobody slow, nor do small differences; bad input is ignored."""
    speeds = Speeds()
    for _ in range(50):
        speeds.observe("p0", 1.0, 1.0)
        speeds.observe("p1", 1.0, 1.05)
    for seconds in (100.0, 0.0, -1.0):
        speeds.observe("p0", 1.0, seconds)
    speeds.observe("p0", 0.0, 1.0)
    assert speeds.factor("p0") == speeds.factor("p1") == 1.0
