"""OutlierEjection against its rules, written a second time, under random histories."""

from __future__ import annotations

import random

import pytest

from services.router.forwarding.outlier_ejection import EJECT_AFTER, EJECT_MAX_S, EJECT_MIN_S, OutlierEjection


def eject(ejection: OutlierEjection, now_s: float) -> None:
    """Fail often enough to eject."""
    assert not any(ejection.on_failure(now_s, now_s) for _ in range(EJECT_AFTER - 1))
    assert ejection.on_failure(now_s, now_s)


@pytest.mark.parametrize("seed", range(100))
def test_the_state_follows_from_the_history(seed: int) -> None:
    """Closed below the limit; one probe at a time; ejected for 1 s, then twice as long, up to the maximum."""
    draw = random.Random(seed)
    ejection, now_s = OutlierEjection(), 100.0
    level, row, until_s, probe = 0, 0, None, None
    for number in range(300):
        now_s += draw.choice((0.01, 0.3, 2.0, 40.0))
        choice = draw.randrange(5)
        if choice < 2 and ejection.may_take(now_s):
            assert until_s is None or (now_s >= until_s and probe is None)
            ejection.on_sent(number, now_s)
            probe = number if until_s is not None else None
        elif choice == 2:
            was_out = until_s is not None and now_s < until_s
            row += 1
            is_ejected = ejection.on_failure(now_s, now_s)
            assert is_ejected == (not was_out and row >= EJECT_AFTER), ejection
            if is_ejected:
                until_s, probe = now_s + min(EJECT_MAX_S, EJECT_MIN_S * 2**level), None
                level = min(level + 1, 8)
        elif choice == 3 and draw.random() < 0.5:
            assert ejection.on_answer(now_s) == (until_s is not None)
            if until_s is not None:
                until_s, probe, row = None, None, EJECT_AFTER - 1
        elif choice == 4 and draw.random() < 0.3:
            assert ejection.on_success(now_s) == (until_s is not None)
            until_s, probe, row, level = None, None, 0, 0
        elif probe is not None and draw.random() < 0.2:
            ejection.on_left(probe)
            probe = None
        assert ejection.is_ejected == (until_s is not None) and ejection.failures == row
        assert ejection.may_take(now_s) == (until_s is None or (now_s >= until_s and probe is None))


def test_requests_sent_before_the_ejection_do_not_count() -> None:
    """Requests that failed together eject once. Later results of the same time neither fail nor pass the probe."""
    ejection = OutlierEjection()
    eject(ejection, 10.0)
    assert not ejection.on_failure(9.0, 11.5) and not ejection.on_success(9.0) and not ejection.on_answer(9.0)
    assert ejection.is_ejected and ejection.may_take(11.0) and not ejection.may_take(10.9)
    ejection.on_sent("trial", 11.0)
    assert not ejection.may_take(11.0)
    ejection.on_left("another")
    assert not ejection.may_take(11.0)
    assert ejection.on_failure(11.0, 11.2) and ejection.until_s == pytest.approx(13.2)


def test_probation_ends_with_a_request_that_ended_well() -> None:
    """After a probe one failure ejects. After a good end it takes EJECT_AFTER again, and the time is short again."""
    ejection = OutlierEjection()
    eject(ejection, 10.0)
    assert ejection.on_answer(11.0) and ejection.on_failure(11.1, 11.2)
    assert ejection.until_s == pytest.approx(13.2)
    assert ejection.on_answer(14.0) and not ejection.on_success(14.5)
    eject(ejection, 15.0)
    assert ejection.until_s == pytest.approx(16.0)


@pytest.mark.parametrize("seed", range(50))
def test_the_many_requests_of_one_stall_count_once(seed: int) -> None:
    """Requests in flight at a counted failure fail with it. Only requests that are sent later count again."""
    draw = random.Random(seed)
    ejection, now_s = OutlierEjection(), 100.0
    for stall in range(1, EJECT_AFTER):
        sent = sorted(now_s + draw.random() for _ in range(draw.randrange(1, 30)))
        for number, sent_s in enumerate(sent):
            assert not ejection.on_failure(sent_s, now_s + 5 + 0.1 * number)
        assert ejection.failures == stall, f"seed={seed}"
        now_s += 20.0
    assert ejection.on_failure(now_s, now_s)


@pytest.mark.parametrize("seed", range(20))
def test_each_contradiction_counts_unless_it_is_older_than_the_state(seed: int) -> None:
    """Verdicts of one moment count one by one, those older than the state do not.

    A good end between them resets the count.
    """
    draw, ejection, now_s = random.Random(seed), OutlierEjection(50.0), 60.0
    row = 0
    while row < EJECT_AFTER:
        if draw.random() < 0.3:
            assert not ejection.on_contradiction(49.9, now_s), "from before the engine's boot"
        elif draw.random() < 0.3:
            ejection.on_success(now_s)
            row = 0
        else:
            row += 1
            assert ejection.on_contradiction(55.0, now_s) == (row == EJECT_AFTER)
        assert ejection.failures == row
    assert ejection.is_ejected and not ejection.on_contradiction(59.9, 62.0)
    assert ejection.failures == EJECT_AFTER, (
        "a verdict from before the ejection does not count against the probe"
    )
