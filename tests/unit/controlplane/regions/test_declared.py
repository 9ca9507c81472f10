"""Declared states: merging by revision, the ramp of a drain, and orders of operators."""

from __future__ import annotations

import random

import pytest

from controlplane.regions import orders
from controlplane.regions.declared import SERVING, Declared, DeclaredState, merge, next_revision, ramp
from controlplane.regions.orders import AvoidOrder, Drain, OrderRefused
from controlplane.regions.settings import RegionSettings

SETTINGS = RegionSettings()
REGIONS = ("ap", "eu", "us")
NOW_S = 1_700_000_000.0


def drain(**changes: object) -> Declared:
    """Return the state that a drain of eu declares."""
    fields: dict[str, object] = {"region": "eu", "reason": "rack move", **changes}
    return orders.drain(Drain(**fields), SERVING, REGIONS, "me", NOW_S)  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize("seed", range(30))
def test_merging_agrees_in_any_order(seed: int) -> None:
    """Every listener ends at the highest revision, however states arrive and repeat."""
    rng = random.Random(seed)
    states = [Declared(state=rng.choice(list(DeclaredState)), revision=n) for n in range(6)]
    told = [*rng.choices(states, k=30), states[-1]]
    rng.shuffle(told)
    known = SERVING
    for each in told:
        before, known = known, merge(known, each)
        assert known.revision >= before.revision
    assert known is states[-1]


def test_of_equal_revisions_the_known_state_stays() -> None:
    """Two leaders of one region that declare at once do not make listeners alternate."""
    known, told = Declared(revision=3), Declared(state=DeclaredState.DRAINED, revision=3)
    assert merge(known, told) is known


def test_revisions_rise_also_after_lost_memory_and_clock_steps() -> None:
    """A region that forgot its revision declares above it; a clock that was set back does not lower it."""
    first = next_revision(SERVING, NOW_S)
    assert next_revision(SERVING, NOW_S + 60) > first
    assert next_revision(Declared(revision=first), NOW_S - 3600) == first + 1


@pytest.mark.parametrize(
    ("age_s", "percent"), [(-5, 60), (0, 60), (4.9, 60), (5, 30), (9.9, 30), (10, 0), (1e9, 0)]
)
def test_a_drain_ramps_by_its_age(age_s: float, percent: float) -> None:
    """60, 30 and 0 % at 5 s each; an age below 0 is its start."""
    assert ramp(drain(), age_s, SETTINGS) == percent
    assert ramp(drain(weight_percent=40), age_s, SETTINGS) == max(percent, 40)


def test_only_a_drain_ramps() -> None:
    """SERVING has all, DRAINED nothing, at once."""
    assert ramp(SERVING, 0, SETTINGS) == 100
    assert ramp(Declared(state=DeclaredState.DRAINED), 0, SETTINGS) == 0


def test_until_warns_and_restores_nothing() -> None:
    """After its time the weight is still 0."""
    state = drain(until_s=NOW_S + 60)
    assert not state.is_overdue(NOW_S + 59) and state.is_overdue(NOW_S + 61)
    assert ramp(state, 120, SETTINGS) == 0
    assert not drain().is_overdue(NOW_S + 1e6)


def test_orders_follow_each_other() -> None:
    """Drain, drained and restore have rising revisions."""
    first = drain()
    second = orders.drained(first, NOW_S + 60)
    third = orders.restore("eu", "done", second, REGIONS, "me", NOW_S + 120)
    assert first.revision < second.revision < third.revision
    assert [each.state.value for each in (first, second, third)] == ["DRAINING", "DRAINED", "SERVING"]
    assert second.reason == "rack move" and third.is_serving


@pytest.mark.parametrize("after_s", [2.0, 7.0, 3600.0])
@pytest.mark.parametrize("is_drained", [False, True])
def test_a_second_drain_brings_no_load_back(after_s: float, is_drained: bool) -> None:
    """It changes reason, end and author. State, ramp and an end that it does not name stay."""
    first = drain(until_s=NOW_S + 7200)
    if is_drained:
        first = orders.drained(first, NOW_S + 1)
    now_s = NOW_S + after_s
    longer = orders.drain(Drain("eu", "takes longer"), first, REGIONS, "ann", now_s)
    assert longer.revision > first.revision and longer.state is first.state
    assert ramp(longer, now_s - longer.at_s, SETTINGS) == ramp(first, now_s - first.at_s, SETTINGS)
    assert (longer.reason, longer.author, longer.until_s) == ("takes longer", "ann", NOW_S + 7200)
    later = orders.drain(Drain("eu", "takes longer", NOW_S + 9000), longer, REGIONS, "ann", now_s + 1)
    assert later.until_s == NOW_S + 9000


def test_a_restored_region_is_drained_by_a_ramp_again() -> None:
    """The drain before it is over: its end and its age are not taken over."""
    restored = orders.restore("eu", "done", drain(until_s=NOW_S + 60), REGIONS, "me", NOW_S + 30)
    again = orders.drain(Drain("eu", "again"), restored, REGIONS, "me", NOW_S + 40)
    assert (again.at_s, again.until_s, ramp(again, 0, SETTINGS)) == (NOW_S + 40, 0.0, 60)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"region": "mars"}, 'region: "mars" is unknown, allowed: ap, eu, us'),
        ({"until_s": NOW_S - 1}, "until: 1699999999, allowed: after 1700000000"),
        ({"until_s": float("inf")}, "until: inf"),
        ({"weight_percent": 100}, "weight: 100 %, allowed: from 0 to below 100 %"),
        ({"weight_percent": float("nan")}, "weight: nan %"),
        ({"reason": "   "}, "reason: empty, allowed: 1 to 200 characters"),
        ({"reason": "x" * 201}, "reason: 201 characters, allowed: 1 to 200"),
    ],
)
def test_a_drain_out_of_range_is_refused(changes: dict[str, object], text: str) -> None:
    """With field, value and range."""
    with pytest.raises(OrderRefused) as refused:
        drain(**changes)
    assert text in str(refused.value)


def test_what_serves_cannot_be_restored() -> None:
    """And a region that serves was never draining to its end."""
    with pytest.raises(OrderRefused, match="eu is SERVING, allowed: a region that is DRAINING or DRAINED"):
        orders.restore("eu", "again", SERVING, REGIONS, "me", NOW_S)
    with pytest.raises(OrderRefused, match="state: SERVING, allowed: DRAINING to weight 0"):
        orders.drained(SERVING, NOW_S)
    with pytest.raises(OrderRefused, match="allowed: DRAINING to weight 0"):
        orders.drained(drain(weight_percent=30), NOW_S)


@pytest.mark.parametrize(
    ("order", "text"),
    [
        (AvoidOrder("us", 5, "ill"), "ttl: 5 s, allowed: 10 s to 86400 s"),
        (AvoidOrder("us", 1e6, "ill"), "ttl: 1e+06 s"),
        (AvoidOrder("eu", 60, "ill"), "region: eu is the own region, allowed: ap, us"),
        (AvoidOrder("mars", 60, "ill"), 'region: "mars" is unknown'),
        (AvoidOrder("us", 60, ""), "reason: empty"),
    ],
)
def test_an_order_to_avoid_out_of_range_is_refused(order: AvoidOrder, text: str) -> None:
    """With field, value and range; the sentences come one by one, too."""
    with pytest.raises(OrderRefused) as refused:
        orders.avoid(order, "eu", REGIONS, "me", 0.0)
    assert text in refused.value.reasons[0]


def test_an_order_to_avoid_ends_by_monotonic_time() -> None:
    """Its end is the time of the process plus its TTL."""
    assert orders.avoid(AvoidOrder("us", 60, "ill", True), "eu", REGIONS, "me", 7.0).until_s == 67.0
