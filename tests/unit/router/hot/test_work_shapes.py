"""Shapes are powers of two, rounded up, with decayed counts."""

from __future__ import annotations

import random
from math import exp

import pytest

from services.router.hot.decay import DECAY_S
from services.router.hot.work_shapes import WEIGHT_MIN, WorkShapes


@pytest.mark.parametrize("seed", range(20))
def test_shapes_of_random_work(seed: int) -> None:
    """Each request counts in the smallest shape that holds it: against a count of all requests."""
    rng = random.Random(seed)
    shapes, now_s = WorkShapes(), 10.0
    done: list[tuple[int, int, float]] = []
    for _ in range(200):
        now_s += rng.choice((0.0, 1.0, 30.0))
        tokens = rng.choice((-5, 0, 1, 2, 3, 4, 5, 1000, 1024, 1 << 31, 1 << 32, 1 << 50))
        batch = rng.choice((rng.randrange(70), rng.randrange(1 << 34)))
        shapes.add(tokens, batch, now_s)
        done.append((tokens, batch, now_s))
    found = shapes.ranked(now_s)
    assert [one.weight for one in found] == sorted((one.weight for one in found), reverse=True)
    for kind in (0, 1):
        expected: dict[int, float] = {}
        for request in done:
            power = next((1 << at for at in range(32) if 1 << at >= request[kind]), 1 << 31)
            expected[power] = expected.get(power, 0.0) + exp((request[2] - now_s) / DECAY_S)
        expected = {power: weight for power, weight in expected.items() if weight >= WEIGHT_MIN}
        measured = {one[kind]: one.weight for one in found if one[kind]}
        assert measured == pytest.approx(expected)
    assert all((one.prompt_tokens == 0) != (one.batch == 0) for one in found)


def test_old_shapes_are_left_out() -> None:
    """Once their weight is below WEIGHT_MIN."""
    shapes = WorkShapes()
    shapes.add(100, 3, 0.0)
    assert [one[:2] for one in shapes.ranked(1.0)] == [(128, 0), (0, 4)]
    assert not shapes.ranked(DECAY_S * 5)
