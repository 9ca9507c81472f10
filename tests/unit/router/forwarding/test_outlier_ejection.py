"""Ejection against the rules in its own words, under random histories."""

from __future__ import annotations

import random

import pytest

from services.router.forwarding.outlier_ejection import EJECT_AFTER, EJECT_MAX_S, EJECT_MIN_S, OutlierEjection


def eject(ejection: OutlierEjection, now_s: float) -> None:
    """Fail as often as it takes."""
    assert not any(ejection.on_failure(now_s, now_s) for _ in range(EJECT_AFTER - 1))
    assert ejection.on_failure(now_s, now_s)


@pytest.mark.parametrize("seed", range(100))
def test_the_state_is_what_the_history_says(seed: int) -> None:
    """Trusted below the limit; one trial at a time; ejected 1 s, then twice as long, never longer than the maximum."""
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


def test_what_was_sent_before_says_nothing() -> None:
    """The crowd that failed together ejects once; its stragglers neither fail nor pass the trial."""
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
    """After a trial one failure is enough; after an end it takes as many as ever, and the time is short again."""
    ejection = OutlierEjection()
    eject(ejection, 10.0)
    assert ejection.on_answer(11.0) and ejection.on_failure(11.1, 11.2)
    assert ejection.until_s == pytest.approx(13.2)
    assert ejection.on_answer(14.0) and not ejection.on_success(14.5)
    eject(ejection, 15.0)
    assert ejection.until_s == pytest.approx(16.0)


@pytest.mark.parametrize("seed", range(50))
def test_the_many_requests_of_one_stall_count_once(seed: int) -> None:
    """Whatever was in flight when a failure was noticed fails with it; only what is sent later can fail again."""
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
def test_each_contradiction_counts_unless_a_newer_state_knows_better(seed: int) -> None:
    """Verdicts of one moment count one by one, older ones than the state do not; a good end between them forgives."""
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
        "what was said before the ejection does not count against the trial"
    )
