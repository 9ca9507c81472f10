"""How fast the queue drains."""

from __future__ import annotations

import math
import random

import pytest

from kvmesh.drain_rate import RETRY_MS_MAX, RETRY_MS_MIN
from services.router.queue.queue_delay import RELEASES_MIN, RETRY_MS_UNKNOWN, QueueDelay


def run(drain: QueueDelay, per_s: float, tokens: int, start_s: float, end_s: float) -> None:
    """Release evenly while something waits."""
    drain.waits(True, start_s)
    for number in range(1, int((end_s - start_s) * per_s) + 1):
        drain.released(tokens, start_s + number / per_s)


def test_nothing_is_known_at_first_and_nobody_waits_behind_nothing() -> None:
    """Unknown is not zero; without anything ahead there is no wait."""
    drain = QueueDelay()
    assert drain.wait_s(1000.0, 0.0) is None and drain.retry_after_ms(1000.0, 0.0) == RETRY_MS_UNKNOWN
    assert drain.wait_s(0.0, 0.0) == 0.0
    for _ in range(RELEASES_MIN * 2):
        drain.released(100, 1.0)  # nobody waits
        drain.waits(True, 1.0)
        drain.released(100, 1.0)  # nobody waited
        drain.waits(False, 1.0)
    assert drain.wait_s(1000.0, 2.0) is None


@pytest.mark.parametrize("seed", range(5))
def test_the_rate_is_that_of_busy_times(seed: int) -> None:
    """Whatever idle times lie between, the rate is within a tenth of what was released while something waited."""
    draw, drain, now_s = random.Random(seed), QueueDelay(), 0.0
    for _ in range(10):
        length_s = draw.uniform(1.0, 5.0)
        run(drain, 50.0, 200, now_s, now_s + length_s)
        now_s += length_s
        drain.waits(False, now_s)
        now_s += draw.uniform(0.0, 100.0)
    assert drain.wait_s(5000.0, now_s) == pytest.approx(0.5, rel=0.1)


def test_it_follows_a_pool_that_shrinks_or_stands_still() -> None:
    """After some seconds the new rate holds, and a queue that does not move is seen as such."""
    drain = QueueDelay()
    run(drain, 50.0, 200, 0.0, 30.0)
    run(drain, 10.0, 200, 30.0, 70.0)
    assert drain.wait_s(1000.0, 70.0) == pytest.approx(0.5, rel=0.15)
    slower = [drain.wait_s(1000.0, now_s) or 0.0 for now_s in (80.0, 90.0, 120.0)]
    assert slower == sorted(slower) and slower[-1] > 10.0


def test_retries_are_told_within_bounds() -> None:
    """From 50 ms to 30 s."""
    drain = QueueDelay()
    run(drain, 50.0, 200, 0.0, 10.0)
    assert drain.retry_after_ms(1.0, 10.0) == RETRY_MS_MIN
    assert drain.retry_after_ms(1e9, 10.0) == RETRY_MS_MAX
    assert drain.retry_after_ms(math.inf, 10.0) == RETRY_MS_MAX
    assert drain.retry_after_ms(20_000.0, 10.0) == pytest.approx(2000, rel=0.1)
