"""Displaced demand: cache-affine requests of a replica, and the cost of other work there to them."""

from __future__ import annotations

import random

import pytest

from services.router.placement.displaced_demand import BUSY_MAX, MEMORY_S, DisplacedDemand, loss_integral


def test_the_closed_form_is_the_integral() -> None:
    """loss_integral is the sum over small steps of the loss of a request that comes then, and never falls."""
    rng = random.Random(1)
    for _ in range(50):
        work_s, loss_s = rng.uniform(0, 5), rng.uniform(0, 5)
        steps = 2000
        total = sum(min(loss_s, (step + 0.5) * work_s / steps) for step in range(steps)) * work_s / steps
        assert loss_integral(work_s, loss_s) == pytest.approx(total, abs=1e-4)


def test_work_delays_affine_requests_as_long_as_they_would_wait() -> None:
    """One request a second that would lose 2 s elsewhere: 10 s of work cost 10 * 2 - 2, later on less."""
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


def test_a_request_without_a_loss_elsewhere_is_not_affine() -> None:
    """Requests that are as well off elsewhere go elsewhere when the replica is busy."""
    displaced = DisplacedDemand()
    displaced.record("p0", 0.0, 0.1, 1.0)
    assert displaced.delay_s("p0", 1.0, 1.0, 0.5, 1.0) == 0


def test_shortest_first_only_affine_work_lengthens_the_wait() -> None:
    """Requests that lose little elsewhere take half of the time and go elsewhere. They add next to nothing.

    Cache-affine requests of 0.1 s that would lose 2 s count with nearly all of their seconds. First come, first served
    counts all work.
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
    """For any share of busy time, the loss is at most 1 / (1 - BUSY_MAX) of the loss by the work itself."""
    displaced = DisplacedDemand()
    for tick in range(3000):
        displaced.record("p0", 2.0, 5.0, tick / 10)
    bare = displaced.delay_s("p0", 0.0, 1.0, 0.0, 299.9)
    for busy in (None, 0.95, 3.0):
        assert displaced.delay_s("p0", 0.0, 1.0, busy, 299.9) == pytest.approx(bare / (1 - BUSY_MAX))
