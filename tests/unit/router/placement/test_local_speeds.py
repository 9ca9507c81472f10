"""Speed factors of decode replicas that run prompts."""

from __future__ import annotations

import random

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.cost_policy import CostPolicy
from services.router.placement.local_speeds import FADE_S, LocalSpeeds
from services.router.placement.policy import (
    Dispatched,
    Finished,
    Hit,
    Placement,
    PlacementRequest,
    PoolView,
    ReplicaState,
    Started,
)
from tests.unit.router.desk import Desk, first


@pytest.mark.parametrize("seed", range(5))
def test_each_factor_is_learnt_and_a_new_replica_is_like_all(seed: int) -> None:
    """All are twice as slow, one six times, with noise and stalls. An unknown replica has the factor of all."""
    rng, speeds, now_s = random.Random(seed), LocalSpeeds(), 100.0
    for _ in range(200):
        for name, factor in (("d0", 2.0), ("d1", 2.0), ("d2", 6.0), ("d3", 2.0)):
            now_s += 0.1
            seconds = factor * rng.lognormvariate(0, 0.1) * (50 if rng.random() < 0.05 else 1)
            speeds.observe(name, 1.0, seconds, now_s)
    assert speeds.factor("d2", now_s) == pytest.approx(6.0, rel=0.25)
    assert all(speeds.factor(name, now_s) == pytest.approx(2.0, rel=0.25) for name in ("d0", "d1", "d3"))
    assert 1.5 < speeds.factor("new", now_s) < 4.0
    speeds.forget("d2")
    assert speeds.factor("d2", now_s) == speeds.factor("new", now_s)


def test_one_outlier_moves_little_and_bad_input_nothing() -> None:
    """A single prompt of 100 times the seconds makes no replica slow."""
    speeds = LocalSpeeds()
    for seconds in (100.0, 0.0, -1.0):
        speeds.observe("d0", 1.0, seconds, 1.0)
    speeds.observe("d0", 0.0, 1.0, 1.0)
    assert speeds.factor("d0", 1.0) == 1.0


def test_factors_fade() -> None:
    """A replica without prompts for long counts as usual again, and is learnt as before."""
    speeds = LocalSpeeds()
    for _ in range(100):
        speeds.observe("d0", 1.0, 8.0, 1.0)
    before = speeds.factor("d0", 1.0)
    assert before > 6.0
    assert 1.0 < speeds.factor("d0", 1.0 + FADE_S) < before / 2
    assert speeds.factor("d0", 1.0 + 10 * FADE_S) == 1.0
    assert speeds.factor("d0", 0.0) == before, "an event that comes late is no future"


TOKENS = 300


class Mesh:
    """A policy, and replicas with prefill times set by the test."""

    def __init__(self, prefills: int) -> None:
        self.policy = CostPolicy(
            "r0",
            LocalPrefixIndex(),
            random.Random(3),
            block_tokens=32,
            dispatch_ahead_s=100.0,
            local_prefill_tokens_max=512,
        )
        self.view = PoolView(
            [ReplicaState(f"p{index}") for index in range(prefills)],
            [ReplicaState(name, block_total=10_000, reported_at_s=1e9) for name in ("d0", "d1")],
        )
        for one in (*self.view.prefill, *self.view.decode):
            self.policy.local_index.add(one.name)
        self.now_s = 100.0
        self._count = 0

    def run(self, local_s: float, prefill_s: float = 0.025) -> Placement:
        """Run one prompt."""
        self.now_s += 1.0
        self._count += 1
        request_id = f"{self._count:032x}"
        answer = self.policy.place(PlacementRequest(request_id, (), TOKENS, 50), self.view, self.now_s)
        assert isinstance(answer, Placement)
        replica, seconds = answer.prefill or answer.decode, prefill_s if answer.prefill else local_s
        until_s = self.now_s + 60
        self.policy.observe(Dispatched("r0", request_id, replica, (), answer.prefill_s, self.now_s, until_s))
        self.policy.observe(Started("r0", request_id, self.now_s))
        hit = Hit(0, TOKENS, 0, seconds) if answer.prefill else Hit(0, TOKENS, 0, 0.0, seconds)
        self.policy.observe(Finished("r0", request_id, self.now_s + seconds, hit))
        return answer


def test_decode_that_is_slow_gets_next_to_no_prompts_until_it_is_quick_again() -> None:
    """Decode takes sixty times the estimate: prefill replicas run the prompts, and their costs stay."""
    mesh = Mesh(prefills=1)
    assert all(mesh.run(0.025).prefill is None for _ in range(50))
    for _ in range(50):
        mesh.run(1.5)
    assert sum(mesh.run(1.5).prefill is None for _ in range(300)) < 20
    assert mesh.policy.costs.estimate_s(TOKENS, TOKENS) == pytest.approx(0.025, rel=0.1)
    for _ in range(300):
        mesh.run(0.025)
    assert sum(mesh.run(0.025).prefill is None for _ in range(100)) == 100


def test_without_prefill_replicas_estimates_follow_what_decode_takes() -> None:
    """All prompts take a second. The costs of prefill replicas, which are not measured, stay unknown."""
    mesh = Mesh(prefills=0)
    for _ in range(200):
        mesh.run(1.0)
    assert mesh.run(1.0).prefill_s == pytest.approx(1.0, rel=0.2)
    assert not mesh.policy.knows_costs()


def test_a_prompt_of_decode_is_not_charged_with_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """If two prompts run at once, the second took the time after the first. If two first tokens coincide, one counts."""
    desk, seen = Desk(prefills=0), []
    monkeypatch.setattr(desk.policy.local_speeds, "observe", lambda *told: seen.append((told[0], told[2])))
    monkeypatch.setattr(desk.links["decode-1"][0], "is_draining", True)
    slots = []
    for number in range(4):
        desk.submit(request_id=f"{number + 1:032x}")
        _, submit = desk.placed()
        slots.append(submit.slot)
    desk.down("decode-0", starts=[pb.Start(slot=slot) for slot in slots])
    for wait_s, computed in ((0.5, slots[:1]), (0.1, slots[1:2]), (0.2, slots[2:])):
        desk.wait(wait_s)
        tokens = [first(slot) for slot in computed]
        for token in tokens:
            token.prefill_us = round((desk.now_s - 50.0) * 1e6)
        desk.down("decode-0", first_tokens=tokens)
    assert seen == [("decode-0", pytest.approx(seconds)) for seconds in (0.5, 0.1, 0.2)]


@pytest.mark.parametrize("batch", [1, 2, 4, 8])
def test_prompts_that_one_step_computes_take_as_long_as_the_step(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first tokens of a step come one message after another. Only the first one measures the step."""
    desk, seen = Desk(prefills=0), list[float]()
    monkeypatch.setattr(desk.policy.local_speeds, "observe", lambda *told: seen.append(told[2]))
    monkeypatch.setattr(desk.links["decode-1"][0], "is_draining", True)
    for number in range(5):
        slots = []
        for index in range(batch):
            desk.submit(request_id=f"{number * batch + index:032x}")
            slots.append(desk.placed()[1].slot)
        desk.wait(0.075)
        for slot in slots:
            told = first(slot)
            told.prefill_us = 75_000
            desk.down("decode-0", starts=[pb.Start(slot=slot)], first_tokens=[told])
            desk.down(
                "decode-0", finishes=[pb.Finish(slot=slot, end_position=1, reason=pb.Finish.REASON_LENGTH)]
            )
            desk.wait(0.0005)
    assert seen and all(seconds == 0.0 or seconds == pytest.approx(0.075, rel=0.1) for seconds in seen), seen
    assert sum(seconds > 0.0 for seconds in seen) == 5


def test_factors_against_a_guess_are_forgotten_with_it() -> None:
    """Decode ran all prompts before a prefill replica came. After its measurement the factor of decode is reset."""
    mesh = Mesh(prefills=0)
    for _ in range(100):
        mesh.run(0.2)
    mesh.view = PoolView([ReplicaState("p0")], mesh.view.decode)
    mesh.policy.local_index.add("p0")
    for _ in range(60):
        mesh.run(0.2, prefill_s=0.2)
    assert sum(mesh.run(0.2, prefill_s=0.2).prefill is None for _ in range(60)) > 50
