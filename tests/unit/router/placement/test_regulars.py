"""Those who come to a replica for its cache, and what work there costs them."""

from __future__ import annotations

import random

import pytest

from services.router.placement.regulars import MEMORY_S, Regulars, waited_s


def test_the_closed_form_is_the_integral() -> None:
    """waited_s is the sum over small steps of what one who comes then loses, and never falls."""
    rng = random.Random(1)
    for _ in range(50):
        work_s, patience_s = rng.uniform(0, 5), rng.uniform(0, 5)
        steps = 2000
        total = sum(min(patience_s, (step + 0.5) * work_s / steps) for step in range(steps)) * work_s / steps
        assert waited_s(work_s, patience_s) == pytest.approx(total, abs=1e-4)


def test_work_delays_those_who_come_and_only_as_long_as_they_would_wait() -> None:
    """One a second for long, each of whom would lose 2 s elsewhere: 10 s of work cost 10 * 2 - 2, later on less."""
    regulars = Regulars()
    for second in range(300):
        regulars.came("p0", 2.0, float(second))
    cost_s = regulars.delay_s("p0", 0.0, 10.0, 0.0, 299.0)
    assert cost_s == pytest.approx(18.0, rel=0.03)
    assert regulars.delay_s("p0", 5.0, 10.0, 0.0, 299.0) > cost_s
    assert regulars.delay_s("p0", 0.0, 10.0, 0.5, 299.0) == pytest.approx(2 * cost_s)
    assert regulars.delay_s("p0", 0.0, 10.0, 0.0, 299.0 + 3 * MEMORY_S) < 0.1 * cost_s
    assert regulars.delay_s("p1", 0.0, 10.0, 0.0, 299.0) == 0
    regulars.forget("p0")
    assert regulars.delay_s("p0", 0.0, 10.0, 0.0, 299.0) == 0


def test_who_loses_nothing_elsewhere_is_no_regular() -> None:
    """Requests that could have gone elsewhere as well will do so when the replica is busy."""
    regulars = Regulars()
    regulars.came("p0", 0.0, 1.0)
    assert regulars.delay_s("p0", 1.0, 1.0, 0.5, 1.0) == 0
