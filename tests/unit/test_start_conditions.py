"""The wait of a starting process: it ends when all conditions hold, and in any case at its bound."""

from __future__ import annotations

import random

import pytest

from kvmesh.start_conditions import START_WAIT_S, StartConditions

NAMES = ("tokenizers", "snapshot", "router link", "golden request")
STEP_S = 0.05


@pytest.mark.parametrize("seed", range(200))
def test_the_start_ends_at_the_first_moment_at_which_all_hold_or_at_its_bound(seed: int) -> None:
    """Conditions come and go in random order; a twin computes the end from the whole history."""
    draw = random.Random(seed)
    renewed_by = draw.choice(("", *NAMES))
    start = StartConditions(NAMES, 100.0, renewed_by=renewed_by)
    held = dict.fromkeys(NAMES, False)
    until_s, is_renewed = 100.0 + START_WAIT_S, not renewed_by
    for step in range(round(3 * START_WAIT_S / STEP_S)):
        now_s = 100.0 + step * STEP_S
        name = draw.choice(NAMES)
        held[name] = draw.random() < 0.6
        if not is_renewed and held[renewed_by]:
            is_renewed, until_s = True, now_s + START_WAIT_S
        expected = all(held.values()) or now_s >= until_s
        assert start.check(now_s, held) is expected, start
        assert set(start.unmet) == {each for each in NAMES if not held[each]}
        if expected:
            assert now_s - 100.0 <= 2 * START_WAIT_S + STEP_S
            break
        assert all(each in start.reason() for each in start.unmet)
    else:
        pytest.fail(f"the start never ended: {start}")
    unmet = start.unmet
    assert start.check(now_s + 1.0, dict.fromkeys(NAMES, False)) and start.unmet == unmet
    assert start.reason() == ""


def test_the_bound_is_renewed_once() -> None:
    """A router that comes and goes does not hold the frontend back for ever."""
    start = StartConditions(("router link", "golden request"), 0.0, renewed_by="router link")
    ended_s = next(
        now_s
        for now_s in (step * STEP_S for step in range(1000))
        if start.check(
            now_s, {"router link": now_s >= 1.9 and round(now_s / STEP_S) % 2 == 0, "golden request": False}
        )
    )
    assert ended_s == pytest.approx(1.9 + START_WAIT_S, abs=2 * STEP_S)


def test_seconds_count_from_the_last_time_that_a_condition_came_true() -> None:
    """A condition that was lost in between counts from its return, and an unmet one has no time."""
    start = StartConditions(("a", "b"), 10.0)
    for now_s, a in ((10.1, True), (10.2, False), (10.3, True), (10.4, True)):
        start.check(now_s, {"a": a, "b": False})
    assert start.durations() == {"a": 0.3}
    assert start.seconds("a") == pytest.approx(0.3) and start.seconds("b") == 0.0
    assert start.check(10.5, {"a": True, "b": True}) and start.durations() == {"a": 0.3, "b": 0.5}
