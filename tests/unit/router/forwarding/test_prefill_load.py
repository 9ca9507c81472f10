"""Prefill work per second: equal to a count over the last minute, whatever the schedule of samples."""

from __future__ import annotations

import random

import pytest

from services.router.forwarding.prefill_load import SPAN_MIN_S, WINDOW_S, ArrivedPrompts, PrefillLoad
from services.router.placement.cost_model import CostModel


def test_the_rates_are_those_of_a_plain_count() -> None:
    """The twin keeps every prompt with its time, and estimates each by the cost model."""
    chance, load, prompts, costs = random.Random(9), PrefillLoad(), ArrivedPrompts(), CostModel()
    now_s, measured_s = 100.0, 0.0
    sampled_s: list[float] = []
    arrived: list[tuple[float, int]] = []
    work: list[tuple[float, float]] = []
    for _ in range(4_000):
        now_s += chance.choice((0.01, 0.2))
        tokens, seconds = chance.randint(1, 5_000), chance.random()
        prompts.add(tokens)
        arrived.append((now_s, tokens))
        measured_s += seconds
        work.append((now_s, seconds))
        if not sampled_s or now_s - sampled_s[-1] >= 1.0:
            sampled_s.append(now_s)
        load.take(prompts, measured_s, now_s)
        last_s = sampled_s[-1]
        first_s = max([at_s for at_s in sampled_s if last_s - at_s >= WINDOW_S], default=sampled_s[0])
        if last_s - first_s < SPAN_MIN_S:
            assert load.measured_per_s() == load.uncached_per_s(costs.coefficients) == 0.0
            continue
        span_s = last_s - first_s
        cold = sum(costs.estimate_s(each, each) for at_s, each in arrived if first_s < at_s <= last_s)
        warm = sum(each for at_s, each in work if first_s < at_s <= last_s)
        assert load.uncached_per_s(costs.coefficients) == pytest.approx(cold / span_s)
        assert load.measured_per_s() == pytest.approx(warm / span_s)


def test_without_samples_the_load_is_unknown() -> None:
    """One sample has no time."""
    load = PrefillLoad()
    assert load.measured_per_s() == 0.0
    load.take(ArrivedPrompts(), 0.0, 1.0)
    assert load.uncached_per_s((1.0, 1.0, 1.0)) == 0.0
