"""The drain rate of the router's queue."""

from __future__ import annotations

import math
import random

import pytest

from kvmesh.drain_rate import RETRY_MS_MAX, RETRY_MS_MIN
from services.router.queue.queue_delay import RELEASES_MIN, RETRY_MS_UNKNOWN, QueueDelay


def run(drain: QueueDelay, per_s: float, tokens: int, start_s: float, end_s: float) -> None:
    """Release evenly while requests wait."""
    drain.waits(True, start_s)
    for number in range(1, int((end_s - start_s) * per_s) + 1):
        drain.released(tokens, start_s + number / per_s)


def test_the_rate_is_unknown_at_first_and_nothing_ahead_means_no_wait() -> None:
    """Unknown is not zero; with nothing ahead the wait is 0."""
    drain = QueueDelay()
    assert drain.wait_s(1000.0, 0.0) is None and drain.retry_after_ms(1000.0, 0.0) == RETRY_MS_UNKNOWN
    assert drain.wait_s(0.0, 0.0) == 0.0
    for _ in range(RELEASES_MIN * 2):
        drain.released(100, 1.0)  # without waiting requests
        drain.waits(True, 1.0)
        drain.released(100, 1.0)  # without waiting requests
        drain.waits(False, 1.0)
    assert drain.wait_s(1000.0, 2.0) is None


@pytest.mark.parametrize("seed", range(5))
def test_the_rate_is_that_of_busy_times(seed: int) -> None:
    """For any idle times between, the rate is within a tenth of the rate of releases while requests waited."""
    draw, drain, now_s = random.Random(seed), QueueDelay(), 0.0
    for _ in range(10):
        length_s = draw.uniform(1.0, 5.0)
        run(drain, 50.0, 200, now_s, now_s + length_s)
        now_s += length_s
        drain.waits(False, now_s)
        now_s += draw.uniform(0.0, 100.0)
    assert drain.wait_s(5000.0, now_s) == pytest.approx(0.5, rel=0.1)


def test_it_follows_a_pool_that_shrinks_or_stands_still() -> None:
    """After some seconds the new rate holds, and a queue that stands still is detected."""
    drain = QueueDelay()
    run(drain, 50.0, 200, 0.0, 30.0)
    run(drain, 10.0, 200, 30.0, 70.0)
    assert drain.wait_s(1000.0, 70.0) == pytest.approx(0.5, rel=0.15)
    slower = [drain.wait_s(1000.0, now_s) or 0.0 for now_s in (80.0, 90.0, 120.0)]
    assert slower == sorted(slower) and slower[-1] > 10.0


def test_retry_after_stays_within_bounds() -> None:
    """From 50 ms to 30 s."""
    drain = QueueDelay()
    run(drain, 50.0, 200, 0.0, 10.0)
    assert drain.retry_after_ms(1.0, 10.0) == RETRY_MS_MIN
    assert drain.retry_after_ms(1e9, 10.0) == RETRY_MS_MAX
    assert drain.retry_after_ms(math.inf, 10.0) == RETRY_MS_MAX
    assert drain.retry_after_ms(20_000.0, 10.0) == pytest.approx(2000, rel=0.1)
