"""The rate at which something comes free."""

from __future__ import annotations

import random

import pytest

from kvmesh.replica.drain_rate import WAIT_MS_MAX, WINDOW_S, DrainRate


def test_nothing_came_free_yet() -> None:
    """Unknown is zero, not a guess."""
    rate = DrainRate()
    assert rate.wait_ms(5, 10.0) == 0
    rate.begin(10.0)
    assert rate.wait_ms(5, 100.0) == 0


@pytest.mark.parametrize("seed", range(10))
def test_a_steady_stream_is_measured(seed: int) -> None:
    """Whatever the size of what comes free, after two windows its rate is known within a third."""
    print(f"seed={seed}")
    rng = random.Random(seed)
    per_s = 10 ** rng.uniform(1.0, 4.0)
    rate, now_s = DrainRate(), 1000.0
    rate.begin(now_s)
    while now_s < 1000 + 2 * WINDOW_S:
        pause_s = rng.expovariate(20.0)
        now_s += pause_s
        rate.freed(per_s / 20, now_s)
    assert 0.66 * per_s <= rate.per_s(now_s) <= 1.5 * per_s
    wait_ms = rate.wait_ms(per_s, now_s)
    assert 660 <= wait_ms <= 1500


def test_a_short_start_is_no_flood_and_silence_makes_waits_longer() -> None:
    """A first release right after the beginning promises little; waits grow while nothing comes free, up to the bound."""
    rate = DrainRate()
    rate.begin(10.0)
    rate.freed(100, 10.001)
    assert rate.per_s(10.001) <= 100 / (0.05 * WINDOW_S)
    waits = [rate.wait_ms(100, 11.0 + pause_s) for pause_s in (0, 2, 5, 20, 1000)]
    assert waits == sorted(waits) and waits[0] < waits[1] and waits[-1] == WAIT_MS_MAX


def test_a_clock_that_stands_still_is_no_bug() -> None:
    """Many releases at one moment add up."""
    rate = DrainRate()
    for _ in range(10):
        rate.freed(1, 5.0)
    assert rate.wait_ms(10, 5.0) > 0
    assert rate.wait_ms(0, 5.0) == 1
