"""The values cached for a sequence of replicas, against a look at each replica."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from services.router.placement.collision_risk import CollisionRisk
from services.router.placement.policy import ReplicaState


class Counted(list[ReplicaState]):
    """Counts how often it is iterated."""

    looks = 0

    def __iter__(self) -> Iterator[ReplicaState]:
        self.looks += 1
        return super().__iter__()


@pytest.mark.parametrize("seed", range(20))
def test_cached_risks_equal_computed_ones(seed: int) -> None:
    """Routers and replicas come and go. With the same sequence the answers are those with a copy each time."""
    rng = random.Random(seed)
    kept, anew = CollisionRisk("r1"), CollisionRisk("r1")
    names, now_s = [f"p{index}" for index in range(12)], 100.0
    replicas = [ReplicaState(name) for name in names[:8]]
    for _ in range(300):
        now_s += rng.choice((0.0, 0.01, 1.0, 15.0))
        router, name = f"r{rng.randrange(4)}", rng.choice(names)
        choice, at_s = rng.randrange(8), now_s - rng.choice((0.0, 0.1))
        if choice == 2:
            replicas = [ReplicaState(one) for one in rng.sample(names, rng.randrange(1, 12))]
        for risks in (kept, anew):
            if choice == 0:
                risks.forget_router(router)
            elif choice == 1:
                risks.forget_replica(name)
            else:
                risks.record_dispatch(router, at_s, now_s)
        kept.update(replicas, 3, now_s)
        anew.update([*replicas], 3, now_s)
        assert [kept.risk(one) for one in names] == [anew.risk(one) for one in names], seed


def test_a_sequence_is_iterated_once() -> None:
    """A decision among a thousand replicas must not look at each of them."""
    risks, replicas = CollisionRisk("r1"), Counted(ReplicaState(f"p{index}") for index in range(8))
    for moment in range(20):
        risks.record_dispatch("r2", float(moment))
        risks.update(replicas, 3, float(moment))
    assert replicas.looks == 1
    risks.forget_replica("p3")
    risks.update(replicas, 3, 20.0)
    assert replicas.looks == 2


@pytest.mark.parametrize("gap_s", [0.01, 0.1, 1.0])
def test_the_lag_counts_and_not_the_time_until_the_next_decision(gap_s: float) -> None:
    """Without lag no replica costs more, however rare decisions are. With more lag the risk is higher."""
    names, chances = [f"p{index}" for index in range(6)], []
    for lag_s in (0.0, 0.05, 0.5):
        risks, now_s = CollisionRisk("r1"), 0.0
        for number in range(400):
            risks.record_dispatch(f"r{2 + number % 2}", now_s - lag_s, now_s)
            risks.update([ReplicaState(name) for name in names], 6, now_s + gap_s / 2)
            now_s += gap_s
        chances.append(sum(map(risks.risk, names)))
    assert chances[0] == 0.0 < chances[1] < chances[2]


def test_repeated_dispatches_change_no_risk() -> None:
    """After a loss peer routers repeat all open dispatches, which are old. Only live messages tell the lag and the rate."""
    risks, replicas, now_s = CollisionRisk("r1"), [ReplicaState(f"p{index}") for index in range(6)], 100.0

    def risk() -> float:
        risks.update(replicas, 6, now_s)
        return sum(risks.risk(one.name) for one in replicas)

    for number in range(200):
        now_s += 0.05
        risks.record_dispatch(f"r{2 + number % 2}", now_s - 0.02, now_s)
    before = risk()
    for number in range(100):
        risks.record_dispatch(f"r{2 + number % 2}", now_s - 40.0 - number, now_s)
    assert before > 0 and risk() == pytest.approx(before, rel=0.02)
