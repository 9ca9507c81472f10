"""Slopes: a leak is seen through noise and restarts; noise and restarts alone are no leak."""

from __future__ import annotations

import random

import pytest

from tests.chaos.slopes import (
    FLAT,
    GROWS,
    HOUR,
    MINUTES_OF_A_DAY,
    NOT_JUDGED,
    USUAL,
    WATCHED_S_MIN,
    Sample,
    Slope,
    bars,
    slope_of,
    watch_of,
)
from tests.chaos.soak_record import SoakRecord


def samples(
    rng: random.Random,
    mb_per_min: float,
    *,
    noise_mb: float = 1.5,
    life_s: float = 1200.0,
    first_mb: float = 90.0,
) -> list[Sample]:
    """20 minutes of a process that fills caches for a minute, leaks, is noisy, and is started again each `life_s`."""
    made = []
    for index in range(240):
        at_s = 5.0 * index
        age_s = at_s % life_s
        filled_mb = 8.0 * min(1.0, age_s / 60)
        size_mb = first_mb + filled_mb + mb_per_min * age_s / 60 + rng.gauss(0, noise_mb)
        made.append(Sample(at_s, int(at_s // life_s), size_mb))
    return made


@pytest.mark.parametrize("life_s", [1200.0, 400.0, 280.0])
def test_a_leak_shows_through_noise_and_restarts(life_s: float) -> None:
    """2 MB a minute are found, about as large as they are, also when the process is started again and again."""
    for seed in range(20):
        slope = slope_of("decode-0", samples(random.Random(seed), 2.0, life_s=life_s))
        assert slope.mb_per_min is not None
        assert slope.verdict == GROWS, f"seed={seed}: {slope}"
        assert 1.5 < slope.mb_per_min < 2.5, f"seed={seed}: {slope}"


@pytest.mark.parametrize("life_s", [1200.0, 400.0])
def test_noise_and_restarts_alone_are_flat(life_s: float) -> None:
    """Caches that fill in the first minute and a new process that is smaller than the old one do not count."""
    for seed in range(20):
        slope = slope_of("decode-0", samples(random.Random(seed), 0.0, life_s=life_s))
        assert slope.verdict == FLAT, f"seed={seed}: {slope}"


def test_a_step_to_a_new_high_water_is_no_leak() -> None:
    """One replica away doubles the load of the other one: its allocator keeps what that took."""
    for seed in range(10):
        stepped = [
            Sample(one.at_s, one.life, one.megabytes + (30.0 if one.at_s > 500 else 0.0))
            for one in samples(random.Random(seed), 0.0)
        ]
        assert slope_of("decode-0-engine", stepped).verdict == FLAT, f"seed={seed}"


def test_a_little_more_with_each_fault_is_a_leak() -> None:
    """3 MB each 20 s come in steps, and are no high water."""
    for seed in range(10):
        rising = [
            Sample(one.at_s, one.life, one.megabytes + 3.0 * (one.at_s // 20))
            for one in samples(random.Random(seed), 0.0)
        ]
        assert slope_of("decode-0-engine", rising).verdict == GROWS, f"seed={seed}"


def test_a_process_that_never_lives_long_is_not_judged() -> None:
    """No pair of samples says anything; the table shows that."""
    slope = slope_of("redis", samples(random.Random(1), 40.0, life_s=130.0))
    assert slope.mb_per_min is None and slope.verdict == NOT_JUDGED
    short = slope_of("redis", samples(random.Random(1), 40.0)[:36])
    assert short.mb_per_min is not None and short.watched_s < WATCHED_S_MIN and short.verdict == NOT_JUDGED


def test_an_engine_may_fill_its_tables_longer() -> None:
    """Growth for four minutes is a leak in a service, but not in an engine."""
    filling = [Sample(5.0 * index, 1, 90.0 + min(5.0 * index, 240.0) / 12) for index in range(60)]
    assert slope_of("decode-0", filling).verdict == GROWS
    filled = filling + [Sample(5.0 * index, 1, 110.0) for index in range(60, 120)]
    assert slope_of("decode-0-engine", filled).verdict == FLAT


def hour(rng: random.Random, mb_per_min: float) -> list[Sample]:
    """An hour of a process: it is started again every 5 minutes for 20 minutes, and fills caches for 8 minutes."""
    made = []
    for index in range(720):
        at_s = 5.0 * index
        life = min(4, int(at_s // 300))
        age_min = (at_s - 300 * life) / 60
        size_mb = 90.0 + 2.0 * min(age_min, 8.0) + mb_per_min * age_min + rng.gauss(0, 1.5)
        made.append(Sample(at_s, life, size_mb))
    return made


def test_an_hour_finds_a_leak_of_200_mb_a_day() -> None:
    """Twice as much is always found, nothing is always flat; the soak of minutes takes both for noise."""
    assert watch_of(20) == USUAL and watch_of(60) == HOUR
    for seed in range(20):
        flat = slope_of("decode-0", hour(random.Random(seed), 0.0), HOUR)
        assert flat.verdict == FLAT and flat.watched_s > 1500, f"seed={seed}: {flat}"
        assert round(flat.bound_mb_per_min * MINUTES_OF_A_DAY) == 200
        leak = hour(random.Random(seed), 400 / MINUTES_OF_A_DAY)
        assert slope_of("decode-0", leak, HOUR).verdict == GROWS, f"seed={seed}"
        assert slope_of("decode-0", leak[480:]).verdict == FLAT, f"seed={seed}"


def test_a_kind_that_was_never_judged_fails_a_soak_that_was_long_enough() -> None:
    """One judged replica stands for the other; a short soak promises nothing."""
    good, none = (slope_of(name, samples(random.Random(1), 0.0)) for name in ("decode-0", "router-0"))
    short = slope_of("decode-1", samples(random.Random(1), 0.0, life_s=60.0))
    other = slope_of("router-1", samples(random.Random(1), 0.0, life_s=60.0))
    assert not soak_of(20, good, none, short, other).has_failed
    assert soak_of(20, good, short, other).unjudged == ["router"]
    assert soak_of(20, good, short, other).has_failed
    assert not soak_of(5, good, short, other).has_failed
    grows = slope_of("decode-1", samples(random.Random(1), 2.0))
    assert soak_of(5, good, grows).has_failed


def soak_of(minutes: float, *slopes: Slope) -> SoakRecord:
    """Return the record of a soak in which nothing but these slopes is of interest."""
    return SoakRecord(
        minutes=minutes,
        seed=1,
        commit="",
        machine="",
        began="",
        every_s=20,
        load=0.7,
        capacity_per_s=5.0,
        capacity_how="",
        requests_per_s=3.5,
        slopes=list(slopes),
    )


def test_a_big_process_may_breathe() -> None:
    """Two per cent of its memory over the time watched are noise for a process of a gigabyte."""
    engine = slope_of("decode-0-engine", samples(random.Random(1), 0.7, first_mb=1000.0))
    assert engine.verdict == FLAT and engine.bound_mb_per_min > 1
    assert slope_of("decode-0-engine", samples(random.Random(1), 2.0, first_mb=1000.0)).verdict == GROWS


def test_bars_show_the_course() -> None:
    """From the smallest to the largest; less than a megabyte up and down is a flat line."""
    assert bars([10.0, 20.0, 30.0, 40.0]) == "▁▃▆█"
    assert set(bars([10.0, 10.05, 10.0, 10.1])) == {"▁"}
    assert len(bars([float(index) for index in range(500)])) == 40
