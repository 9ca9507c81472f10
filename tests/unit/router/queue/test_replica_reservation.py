"""The replicas that a tenant may hold while other tenants are active."""

from __future__ import annotations

import math
import random

import pytest

from services.router.queue.active_tenants import ACTIVE_S
from services.router.queue.prompts import Prompt
from services.router.queue.queue_item import SHADOW_CLASS
from services.router.queue.replica_reservation import (
    BURST_PROMPTS,
    LATE_BINDING_S,
    ReplicaReservation,
    replicas_for,
)

A, B, LOW, HIGH = ("a", 4), ("b", 4), ("low", 2), ("high", 6)
GREED = 1_000_000
"""Waiting prompt tokens: more than the bound of a burst."""

POOL = ["p0", "p1", "p2", "p3"]


def use(
    shares: ReplicaReservation, tenant: tuple[str, int], seconds: float, now_s: float, weight: float = 1.0
) -> None:
    """Record `seconds` of prefill lately used by `tenant`, which holds nothing."""
    shares.end(shares.dispatch(tenant, weight, "p9", seconds, 1000, now_s), now_s)


def test_a_tenant_alone_is_not_held() -> None:
    """It may hold every replica, and an anonymous tenant may have as much work ahead as the policy allows."""
    shares = ReplicaReservation()
    for name in POOL:
        shares.dispatch(A, 1.0, name, 1.0, 1000, 0.0)
    assert shares.allowance(A, 4, 0.0) == 4 and list(shares.may_hold(A, POOL, 0.0)) == POOL
    anonymous = ReplicaReservation()
    anonymous.dispatch(("", 4), 1.0, "p0", 1.0, 1000, 0.0)
    assert anonymous.wait_s(("", 4), "p0", 0.0) == 0.0


def test_replicas_are_reserved_for_others_up_to_their_share() -> None:
    """More use by others reserves more replicas, never more than leaves a tenant its weighted share."""
    last = 4
    for used_s in (0.1, 1.0, 5.0, 50.0):
        shares = ReplicaReservation()
        use(shares, B, used_s, 0.0)
        shares.dispatch(A, 1.0, "p0", 1.0, 1000, 0.0)
        allowed = shares.allowance(A, 4, 0.0, GREED)
        assert 2 <= allowed < 4 and allowed <= last
        last = allowed
    assert last == 2
    heavy = ReplicaReservation()
    use(heavy, B, 50.0, 0.0, weight=1.0)
    heavy.dispatch(A, 3.0, "p0", 1.0, 1000, 0.0)
    assert heavy.allowance(A, 4, 0.0, GREED) == 3, "three parts of four by weight"


def test_a_tenant_keeps_its_replicas_once_it_holds_its_allowance() -> None:
    """The replicas it holds stay open to it. The others are reserved until it releases one, or until they were idle for
    long."""
    shares = ReplicaReservation()
    use(shares, B, 5.0, 0.0)
    held = [shares.dispatch(A, 1.0, name, 1.0, 1000, 0.0) for name in POOL[:2]]
    assert list(shares.may_hold(A, POOL, 0.0)) == POOL, "others take longer themselves"
    assert list(shares.may_hold(A, POOL, 0.0, GREED)) == POOL[:2]
    assert list(shares.may_hold(B, POOL, 0.0, GREED)) == POOL
    shares.end(held[0], 1.5)
    assert list(shares.may_hold(A, POOL, 1.5)) == POOL
    shares.dispatch(A, 1.0, "p3", 1.0, 1000, 1.5)
    shares.dispatch(A, 1.0, "p0", 1.0, 1000, ACTIVE_S - 2.0)
    assert list(shares.may_hold(A, POOL, ACTIVE_S - 1.0, GREED)) == ["p0", "p1", "p3"], "b may come again"
    assert list(shares.may_hold(A, POOL, ACTIVE_S + 2.0, GREED)) == POOL, "b is not about any more"
    shares.assert_consistent()


def test_a_burst_is_held_at_the_prompt_that_makes_it_one() -> None:
    """Running and waiting work of a tenant, over all replicas, against the burst bound: no history is needed."""
    shares = ReplicaReservation()
    for number in range(10):
        use(shares, B, 0.1, 0.1 * number)
    patience = BURST_PROMPTS * 0.1 * len(POOL)
    running = shares.dispatch(A, 1.0, "p0", 0.5 * patience, 1000, 1.0)
    shares.start(running, 1.0)
    shares.dispatch(A, 1.0, "p1", 0.45 * patience, 1000, 1.0)
    assert shares.allowance(A, 4, 1.0) == 4
    third = shares.dispatch(A, 1.0, "p2", 0.1 * patience, 1000, 1.0)
    assert shares.allowance(A, 4, 1.0) < 4
    assert shares.allowance(A, 4, 1.0 + 0.1 * patience) == 4, "some of it is done"
    shares.end(third, 1.0)
    assert shares.allowance(A, 4, 1.0) == 4
    assert shares.allowance(A, 4, 1.0, waiting_tokens=1000) < 4, "waiting work counts like running work"


def test_many_short_prompts_make_no_burst_of_other_tenants() -> None:
    """Each tenant's mean counts by its weight, not by its number of prompts."""
    shares = ReplicaReservation()
    for number in range(200):
        use(shares, B, 0.01, 0.01 * number)
    use(shares, ("c", 4), 1.99, 2.0)
    shares.dispatch(A, 1.0, "p0", 1.0, 1000, 2.0)
    shares.dispatch(A, 1.0, "p1", 0.9 * BURST_PROMPTS * 4 - 1.0, 1000, 2.0)
    assert shares.allowance(A, 4, 2.0) == 4, "an average prompt of b's and c's takes a second"
    shares.dispatch(A, 1.0, "p1", 0.2 * BURST_PROMPTS * 4, 1000, 2.0)
    assert shares.allowance(A, 4, 2.0) < 4


def test_lower_classes_leave_room_for_higher_ones_and_not_the_reverse() -> None:
    """A higher class reserves nothing for a lower one."""
    shares = ReplicaReservation()
    use(shares, HIGH, 5.0, 0.0)
    use(shares, LOW, 5.0, 0.0)
    assert shares.allowance(HIGH, 4, 0.0, GREED) == 4
    assert shares.allowance(LOW, 4, 0.0, GREED) < 4


def test_the_next_prompt_goes_when_the_last_one_is_nearly_done() -> None:
    """Prompts of an engine run one after the other: the time of the second begins when the first ends."""
    shares = ReplicaReservation()
    first = shares.dispatch(A, 1.0, "p0", 1.0, 1000, 0.0)
    shares.start(first, 0.0)
    assert shares.wait_s(B, "p0", 0.0) == pytest.approx(1.0 - LATE_BINDING_S)
    assert shares.wait_s(B, "p0", 1.0 - LATE_BINDING_S) == pytest.approx(0.0)
    second = shares.dispatch(B, 1.0, "p0", 0.5, 1000, 1.0 - LATE_BINDING_S)
    shares.start(second, 1.0 - LATE_BINDING_S)
    assert shares.end(first, 1.2) == math.inf, "news of its start may be late: its replica knows better"
    assert shares.wait_s(A, "p0", 1.2) == pytest.approx(0.5 - LATE_BINDING_S)
    assert shares.end(second, 1.7) == pytest.approx(0.5), "its wait in the engine is not its own time"


def test_erlang() -> None:
    """Table values of the loss formula: 5 servers of 2.22 erlangs and 10 of 6.22 lose 5 of 100."""
    assert replicas_for(2.21, 64) == 5 and replicas_for(2.23, 64) == 6
    assert replicas_for(6.21, 64) == 10 and replicas_for(6.23, 64) == 11
    assert replicas_for(0.0, 64) == 0 and replicas_for(100.0, 3) == 3


@pytest.mark.parametrize("seed", range(10))
def test_counts_are_right_under_random_schedules(seed: int) -> None:
    """Random dispatches, starts, ends and pauses; in the end nothing is left."""
    draw, shares, now_s = random.Random(seed), ReplicaReservation(), 0.0
    prompts: list[Prompt] = []
    for _ in range(400):
        now_s += draw.choice((0.0, 0.01, 1.0, 20.0 if draw.random() < 0.05 else 0.1))
        kind = draw.random()
        tenant = (f"t{draw.randrange(5)}", draw.choice((2, 4)))
        if kind < 0.4:
            weight = draw.choice((0.0, 1.0, 2.0))
            prompts.append(shares.dispatch(tenant, weight, draw.choice(POOL), draw.random(), 1000, now_s))
        elif kind < 0.6 and prompts:
            shares.start(draw.choice(prompts), now_s)
        elif kind < 0.9 and prompts:
            assert shares.end(prompts.pop(draw.randrange(len(prompts))), now_s) >= 0
        else:
            shares.touch(tenant, 1.0, now_s)
        assert 1 <= shares.allowance(tenant, 4, now_s, draw.choice((0, GREED))) <= 4
        assert set(shares.may_hold(tenant, POOL, now_s)) <= set(POOL)
        shares.assert_consistent()
    for prompt in prompts:
        shares.end(prompt, now_s)
    shares.touch(A, 1.0, now_s + 100)
    shares.assert_consistent()
    assert len(shares) == 1


def test_shadow_traffic_has_no_part_in_the_shares_of_tenants() -> None:
    """Copies of users' requests use what is left: they reserve nothing, and each tenant counts as another one for them."""
    shares, alone = ReplicaReservation(), ReplicaReservation()
    shadow = ("shadow", SHADOW_CLASS)
    use(shares, shadow, 50.0, 0.0, weight=1000.0)
    shares.dispatch(shadow, 1000.0, "p1", 5.0, 1000, 0.0)
    for each in (shares, alone):
        each.dispatch(("idle", 0), 1.0, "p0", 1.0, 1000, 0.0)
        assert each.allowance(("idle", 0), 4, 0.0, GREED) == 4
    assert shares.allowance(shadow, 4, 0.0, GREED) <= 4
