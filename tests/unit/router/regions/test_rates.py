"""Rates of running totals: over ten seconds, and smoothed over a minute."""

from __future__ import annotations

import random

import pytest

from services.router.regions.local_prompts import LocalPrompts
from services.router.regions.smoothed_ratio import SMOOTHING_S, SmoothedRatio
from services.router.regions.windows import SPAN_MIN_S, WINDOW_S, Windows


@pytest.mark.parametrize("seed", range(20))
def test_a_window_gives_the_rate_of_the_last_ten_seconds(seed: int) -> None:
    """With samples at random times, the rate is that between the last sample and the one ten seconds before."""
    rng = random.Random(seed)
    windows, now_s, total = Windows(), 50.0, 0.0
    samples: list[tuple[float, float]] = []
    for _ in range(100):
        now_s, total = now_s + rng.uniform(0.1, 3), total + rng.uniform(-1, 50)
        if windows.is_due(now_s):
            samples.append((now_s, total))
            windows.add({"a": total}, now_s)
        first = max((one for one in samples if samples[-1][0] - one[0] >= WINDOW_S), default=samples[0])
        span_s = samples[-1][0] - first[0]
        expected = (samples[-1][1] - first[1]) / span_s if span_s >= SPAN_MIN_S else 0.0
        assert windows.per_s("a") == pytest.approx(max(0.0, expected))
    assert windows.per_s("unknown") == 0


def test_a_total_never_falls_below_a_rate_of_zero() -> None:
    """Corrections may lower a total; its rate stays at least 0."""
    windows = Windows()
    windows.add({"a": 100.0}, 0.0)
    windows.add({"a": 40.0}, 5.0)
    assert windows.per_s("a") == 0.0


def test_a_ratio_follows_in_a_minute_and_stays_when_idle() -> None:
    """A ratio is unknown before the first amounts, moves with a time constant of a minute, and survives a quiet day."""
    ratio = SmoothedRatio()
    ratio.take(0, 0, 0.0)
    assert ratio.value is None
    above = below = 0.0
    for second in range(1, 601):
        above, below = above + 1000, below + 1
        ratio.take(above, below, float(second))
    assert ratio.value == pytest.approx(1000)
    for second in range(601, 601 + round(SMOOTHING_S)):
        above, below = above + 3000, below + 1
        ratio.take(above, below, float(second))
    assert ratio.value == pytest.approx(1000 + 2000 * (1 - 1 / 2.718), rel=0.02)
    value = ratio.value
    ratio.take(above, below, 90_000.0)
    ratio.take(above, below, 180_000.0)
    assert ratio.value == value
    ratio.take(above + 1, below + 0.1, 180_001.0)
    assert ratio.value == pytest.approx(value, rel=0.01), "one cached prompt does not decide alone"


def test_only_timed_prompts_make_a_rate() -> None:
    """A prompt without a measured time counts with its tokens, and not in the rate."""
    computed = LocalPrompts()
    computed.add(100, 0.5)
    computed.add(70, 0.0)
    assert (computed.tokens, computed.measured_tokens, computed.seconds) == (170, 100, 0.5)
