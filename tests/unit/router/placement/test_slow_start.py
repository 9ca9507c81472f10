"""Slow start: a replica that is fresh in service gets less work at first, and the usual decision does not change."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from kvmesh.life_state import SLOW_START_S
from services.router.placement.explanation import why
from services.router.placement.policy import (
    Finished,
    Hit,
    LoadReported,
    ReplicaLost,
)
from services.router.placement.slow_start import WEIGHT_MIN, SlowStarts, multiplier
from tests.unit.router.placement.test_cost_policy import dispatched, placed, policy_of, request, view_of


def report(replica: str, at_s: float, age_s: float = 0.0, *, is_fresh: bool = False) -> LoadReported:
    """Return a load report of an idle replica."""
    return LoadReported(replica, 0, 0, at_s, age_s, is_fresh)


def test_the_multiplier_falls_from_ten_to_one() -> None:
    """Linear in the weight, as Envoy's with an aggression of 1, and bounded for any age."""
    assert multiplier(0.0) == multiplier(-5.0) == 1 / WEIGHT_MIN == 10
    assert multiplier(15.0) == pytest.approx(2.0)
    assert multiplier(SLOW_START_S) == multiplier(1e9) == 1.0
    ages = [age / 10 for age in range(310)]
    assert [multiplier(age) for age in ages] == sorted((multiplier(age) for age in ages), reverse=True)


def test_a_slow_start_is_kept_exactly_while_reports_say_so() -> None:
    """Under any schedule of reports and losses; between two reports the age grows by the local clock."""
    rng = random.Random(3)
    slow, began_s, now_s = SlowStarts(), dict[str, float](), 0.0
    for _ in range(3_000):
        now_s += rng.choice((0.0, 0.5, 3.0))
        name = rng.choice("abc")
        age_s = rng.choice((0.0, 0.001, 12.0, 29.9, 30.0, 1e6))
        match rng.randrange(4):
            case 0:
                slow.forget(name)
                began_s.pop(name, None)
            case 1 | 2:
                slow.take(report(name, now_s, age_s))
                began_s.pop(name, None)
                if 0 < age_s < SLOW_START_S:
                    began_s[name] = now_s - age_s
        expected = {
            name: multiplier(now_s - at_s) for name, at_s in began_s.items() if now_s - at_s < SLOW_START_S
        }
        assert slow.multipliers(now_s) == expected
        assert set(slow.began_s) == set(expected), "a slow start that is over is forgotten"


def test_a_prefill_in_slow_start_gets_work_once_the_others_cost_more() -> None:
    """It is as cheap as the others, so it gets nothing first, and its share when they have ten times the work."""
    policy, view = policy_of(prefills=2), view_of(prefills=2)
    policy.observe(report("p0", 0.0, 0.001))
    for index in range(20):
        assert placed(policy.place(request(index), view, 0.0)).prefill == "p1"
    seconds = placed(policy.place(request(), view, 0.0)).prefill_s
    for index in range(100):
        policy.observe(dispatched(1000 + index, "p1", seconds))
    assert placed(policy.place(request(), view, 0.0)).prefill == "p0"
    answer = placed(policy.place(request(), view, 0.0))
    assert answer.prefill_s == seconds and answer.estimate_s == seconds, "estimates are not multiplied"


def test_a_decode_in_slow_start_is_the_last_choice_among_equals() -> None:
    """For handoffs, and where decode runs the prompt itself."""
    for local in (0, 10_000):
        policy, view = policy_of(prefills=0 if local else 1, local=local), view_of(1 if not local else 0)
        policy.observe(report("d0", 0.0, 5.0))
        chosen = Counter(
            placed(policy.place(request(index, tokens=100), view, 1.0)).decode for index in range(50)
        )
        assert chosen == {"d1": 50}
        policy.observe(report("d0", 2.0))
        chosen = Counter(
            placed(policy.place(request(index, tokens=100), view, 2.0)).decode for index in range(50)
        )
        assert set(chosen) == {"d0", "d1"}


def test_the_prefill_of_a_decode_in_slow_start_costs_more_too() -> None:
    """Its occupancy alone, multiplied, is less than that of the other replica."""
    policy, view = policy_of(prefills=0, local=10_000), view_of(0)
    view.decode[1].block_reserved = 130
    asked = request(tokens=1000)
    assert placed(policy.place(asked, view, 0.0)).decode == "d0"
    policy.observe(report("d0", 0.0, 15.0))
    answer = placed(policy.place(asked, view, 0.0))
    alone_s = 2 * (110 + 1) / 1000
    assert alone_s < (130 + 110 + 1) / 1000 < alone_s + answer.prefill_s
    assert answer.decode == "d1"


def test_without_slow_starts_decisions_do_not_change() -> None:
    """A policy that saw one end decides as one that saw none."""
    rng = random.Random(8)
    calm, seen = policy_of(seed=4), policy_of(seed=4)
    seen.observe(report("p1", 0.0, 29.0))
    seen.observe(report("p1", 0.5))
    for index in range(200):
        asked, view = request(index, tokens=rng.randrange(10, 2000)), view_of()
        assert calm.place(asked, view, 1.0 + index) == seen.place(asked, view, 1.0 + index)


def test_the_explanation_mentions_the_slow_start() -> None:
    """The parts of a score add up, and the reason names the slow start where it decides."""
    policy, view = policy_of(prefills=2), view_of(prefills=2)
    policy.observe(report("p0", 0.0, 3.0))
    policy.observe(report("d0", 0.0, 3.0))
    answer = placed(policy.place(replace(request(), explain=True), view, 0.0))
    chosen, rival = answer.candidates
    assert chosen.replica == "p1" and chosen.slow_start_s == 0.0
    assert rival.slow_start_s == pytest.approx(0.9 * rival.score)
    text = why(answer, waited_s=0.0, waited_for="")
    assert "its slow start adds" in text and "d0 is in slow start" in text
    local = policy_of(prefills=1, decodes=1, local=10_000)
    local.observe(report("p0", 0.0, 3.0))
    explained = placed(local.place(replace(request(tokens=100), explain=True), view_of(1, 1), 0.0))
    assert explained.prefill is None
    assert why(explained, waited_s=0.0, waited_for="").endswith("p0 is in slow start.")


def test_a_replica_that_comes_into_service_is_no_longer_what_it_was() -> None:
    """Its speed as prefill and as decode is forgotten with that report alone; a lost replica has no slow start."""
    policy = policy_of(prefills=3, decodes=3)
    for index in range(60):
        for name, seconds in (("p0", 0.4), ("p1", 0.1), ("p2", 0.1)):
            policy.observe(dispatched(index, name, 0.1))
            policy.observe(Finished("router-0", f"{index:032x}", 1.0, Hit(0, 1000, 0, seconds)))
        policy.observe(dispatched(index, "d0", 0.1))
        policy.observe(Finished("router-0", f"{index:032x}", 1.0, Hit(0, 1000, 0, 0.0, 2.0)))
    assert policy.speeds.factor("p0") > 1.5
    slow_decode = policy.local_speeds.factor("d0", 1.0)
    assert slow_decode > policy.local_speeds.factor("d1", 1.0)
    policy.observe(report("p0", 2.0))
    assert policy.speeds.factor("p0") > 1.5
    policy.observe(report("p0", 3.0, 0.001, is_fresh=True))
    policy.observe(report("d0", 3.0, is_fresh=True))
    assert policy.speeds.factor("p0") == 1.0 and policy.speeds.factor("p1") < 1.5
    assert policy.local_speeds.factor("d0", 1.0) == policy.local_speeds.factor("d1", 1.0)
    assert "p0" in policy.slow_starts.began_s
    policy.observe(ReplicaLost("p0"))
    assert not policy.slow_starts.began_s
