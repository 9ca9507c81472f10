"""An engine that gave wrong golden tokens stays out of service, whatever its pool needs and whichever process leads."""

from __future__ import annotations

import pytest

from controlplane.rollouts.golden import Prompt
from controlplane.warmup.actions import LifeAction, Order
from controlplane.warmup.bounds import ModelBounds
from controlplane.warmup.lives import Lives
from controlplane.warmup.packages import Packages
from controlplane.warmup.references import ReferenceKey, References
from controlplane.warmup.settings import WarmUpSettings
from controlplane.warmup.user_queues import UserQueues
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.life_state import LifeState
from kvmesh.membership.member import Member

NAME = "decode-0"
STEP_S = 0.05


def lives_of(actions: list[LifeAction]) -> Lives:
    references = References((Prompt((1, 2, 3)),), {})
    references.restore(ReferenceKey("v1", "build"), ((1, 2),))
    bounds = ModelBounds(64, 1000, {"decode": 100})
    return Lives(
        WarmUpSettings(),
        references,
        Packages(lambda: 0.0),
        lambda _pool: bounds,
        actions.append,
        lambda _package: None,
    )


def lease(boot_id: str, state: str, engine: str = "engine") -> Member:
    return Member(
        process_id=NAME,
        role="decode",
        address="decode-0:1",
        boot_id=boot_id,
        model_version="v1",
        block_tokens=4,
        engine_boot_id=engine,
        draining=True,
        capabilities=("life",),
        state=state,
        digests={"engine": "build"},
    )


def report(state: str, engine: str = "engine") -> pb.ReplicaLife:
    return pb.ReplicaLife(state=pb.ReplicaState.Value(f"REPLICA_STATE_{state}"), engine_boot_id=engine)


def run(lives: Lives, now_s: float) -> None:
    """Step for 30 s without a result of any job."""
    end_s = now_s + 30.0
    while now_s < end_s:
        lives.step(UserQueues(), lambda _pool: (), now_s)
        now_s += STEP_S


@pytest.mark.parametrize("again", ["STARTING", "PROBING", "SERVING"])
def test_a_restarted_service_of_a_quarantined_engine_stays_out_as_the_last_of_its_role(again: str) -> None:
    actions: list[LifeAction] = []
    lives = lives_of(actions)
    lives.on_members([lease("first", "quarantined")], 0.0)
    lives.on_report(NAME, "first", report("QUARANTINED"), 0.0)
    run(lives, 0.0)
    lives.on_members([lease("second", again.lower())], 40.0)
    lives.on_report(NAME, "second", report(again), 40.0)
    run(lives, 40.0)
    life = lives.get(NAME)
    assert life is not None and life.state is LifeState.QUARANTINED
    assert {each.order.state for each in actions if isinstance(each, Order)} == {pb.REPLICA_STATE_QUARANTINED}


def test_a_new_leader_knows_quarantined_engines_from_the_leases() -> None:
    actions: list[LifeAction] = []
    lives = lives_of(actions)
    lives.on_members([lease("first", "serving")], 0.0)
    lives.on_members([lease("first", "quarantined")], 1.0)
    lives.on_members([lease("second", "starting")], 2.0)
    lives.on_report(NAME, "second", report("STARTING"), 2.0)
    run(lives, 2.0)
    life = lives.get(NAME)
    assert life is not None and life.state is LifeState.QUARANTINED


def test_a_new_engine_of_a_quarantined_replica_may_serve() -> None:
    actions: list[LifeAction] = []
    lives = lives_of(actions)
    lives.on_members([lease("first", "quarantined")], 0.0)
    lives.on_report(NAME, "first", report("QUARANTINED"), 0.0)
    run(lives, 0.0)
    lives.on_members([lease("first", "starting", "other")], 40.0)
    lives.on_report(NAME, "first", report("STARTING", "other"), 40.0)
    run(lives, 40.0)
    life = lives.get(NAME)
    assert life is not None and life.state is LifeState.SERVING
