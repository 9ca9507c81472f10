"""Those who come to a replica for its cache, and what work there costs them."""

from __future__ import annotations

import random

import pytest

from services.router.placement.displaced_demand import BUSY_MAX, MEMORY_S, DisplacedDemand, loss_integral


def test_the_closed_form_is_the_integral() -> None:
    """waited_s is the sum over small steps of what one who comes then loses, and never falls."""
    rng = random.Random(1)
    for _ in range(50):
        work_s, loss_s = rng.uniform(0, 5), rng.uniform(0, 5)
        steps = 2000
        total = sum(min(loss_s, (step + 0.5) * work_s / steps) for step in range(steps)) * work_s / steps
        assert loss_integral(work_s, loss_s) == pytest.approx(total, abs=1e-4)


def test_work_delays_those_who_come_and_only_as_long_as_they_would_wait() -> None:
    """One a second for long, each of whom would lose 2 s elsewhere: 10 s of work cost 10 * 2 - 2, later on less."""
    displaced = DisplacedDemand()
    for second in range(300):
        displaced.record("p0", 2.0, 0.1, float(second))
    cost_s = displaced.delay_s("p0", 0.0, 10.0, 0.0, 299.0)
    assert cost_s == pytest.approx(18.0, rel=0.03)
    assert displaced.delay_s("p0", 5.0, 10.0, 0.0, 299.0) > cost_s
    assert displaced.delay_s("p0", 0.0, 10.0, 0.5, 299.0) == pytest.approx(2 * cost_s)
    assert displaced.delay_s("p0", 0.0, 10.0, 0.0, 299.0 + 3 * MEMORY_S) < 0.1 * cost_s
    assert displaced.delay_s("p1", 0.0, 10.0, 0.0, 299.0) == 0
    displaced.forget("p0")
    assert displaced.delay_s("p0", 0.0, 10.0, 0.0, 299.0) == 0


def test_who_loses_nothing_elsewhere_is_no_regular() -> None:
    """Requests that could have gone elsewhere as well will do so when the replica is busy."""
    displaced = DisplacedDemand()
    displaced.record("p0", 0.0, 0.1, 1.0)
    assert displaced.delay_s("p0", 1.0, 1.0, 0.5, 1.0) == 0


def test_shortest_first_only_the_regulars_lengthen_their_wait() -> None:
    """What loses little elsewhere goes elsewhere: half of the time is its work, and next to nothing is added for it.

    Regulars of 0.1 s that would lose 2 s count with nearly all of their seconds. First come, first served all work counts.
    """
    displaced, guests = DisplacedDemand(), DisplacedDemand()
    for tick in range(3000):
        at_s = tick / 10
        displaced.record("p0", 2.0, 0.05, at_s)
        guests.record("p0", 2.0, 0.005, at_s)
        if not tick % 100:
            guests.record("p0", 0.01, 5.0, at_s)
    half = displaced.delay_s("p0", 0.0, 1.0, None, 299.9)
    bare = displaced.delay_s("p0", 0.0, 1.0, 0.0, 299.9)
    assert half == pytest.approx(2 * bare, rel=0.05), "0.1 s of work each 0.2 s"
    bare = guests.delay_s("p0", 0.0, 1.0, 0.0, 299.9)
    assert guests.delay_s("p0", 0.0, 1.0, None, 299.9) == pytest.approx(1.05 * bare, rel=0.02)
    assert guests.delay_s("p0", 0.0, 1.0, 0.5, 299.9) == pytest.approx(2 * bare)


def test_a_busy_replica_lengthens_a_wait_within_a_bound() -> None:
    """Whatever the share of busy time: at most 1 / (1 - BUSY_MAX) of what the work costs by itself."""
    displaced = DisplacedDemand()
    for tick in range(3000):
        displaced.record("p0", 2.0, 5.0, tick / 10)
    bare = displaced.delay_s("p0", 0.0, 1.0, 0.0, 299.9)
    for busy in (None, 0.95, 3.0):
        assert displaced.delay_s("p0", 0.0, 1.0, busy, 299.9) == pytest.approx(bare / (1 - BUSY_MAX))
