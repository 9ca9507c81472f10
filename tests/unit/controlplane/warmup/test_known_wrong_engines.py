"""An engine that is known to give wrong golden tokens stays out of service, whatever its service and its leader do."""

from __future__ import annotations

import pytest

from controlplane.rollouts.golden import Answer, fixed_prompts
from controlplane.warmup.actions import LifeAction, Order, RunJob
from controlplane.warmup.bounds import ModelBounds
from controlplane.warmup.jobs import ReferenceJob, ReferenceResult
from controlplane.warmup.lives import Lives
from controlplane.warmup.packages import Packages
from controlplane.warmup.references import ReferenceKey, References
from controlplane.warmup.settings import WarmUpSettings
from controlplane.warmup.user_queues import UserQueues
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.membership.member import Member
from tests.unit.controlplane.warmup.leases import lease

KEY = ReferenceKey("v1", "")
PROMPTS = fixed_prompts(256, 1024)[:2]
RIGHT, WRONG = ((1,), (2,)), ((1,), (9,))


class Rig:
    """The lives of decode replicas at one leader."""

    def __init__(self) -> None:
        self.actions: list[LifeAction] = []
        self.references = References(PROMPTS, {})
        self.now_s = 0.0
        self.lives = Lives(
            WarmUpSettings(),
            self.references,
            Packages(lambda: 0.0),
            lambda _: ModelBounds(1024, 256, {"decode": 100}),
            self.actions.append,
            lambda _: None,
        )

    def lease(self, *members: Member) -> None:
        """Take the leases."""
        self.lives.on_members(members, self.now_s)

    def report(
        self, name: str, state: pb.ReplicaState.ValueType, boot_id: str = "b1", engine: str = "e1"
    ) -> None:
        """Take a report."""
        report = pb.ReplicaLife(state=state, engine_boot_id=f"{name}-{engine}")
        self.lives.on_report(name, boot_id, report, self.now_s)

    def step(self) -> None:
        """Let time go on."""
        self.now_s += 0.1
        self.lives.step(UserQueues(), lambda _: (), self.now_s)

    def answer(self, name: str, tokens: tuple[tuple[int, ...], ...]) -> bool:
        """Answer the reference run of a replica. False: none is under way."""
        for each in list(self.actions):
            if (
                isinstance(each, RunJob)
                and isinstance(each.job, ReferenceJob)
                and each.job.target.process_id == name
            ):
                self.actions.remove(each)
                answers = tuple(Answer(ids) for ids in tokens)
                self.lives.on_result(each.number, ReferenceResult(answers), self.now_s)
                return True
        return False


@pytest.mark.parametrize("state", [pb.REPLICA_STATE_STARTING, pb.REPLICA_STATE_SERVING])
@pytest.mark.parametrize("has_led", [True, False])
def test_a_restarted_service_brings_no_wrong_engine_back(
    state: pb.ReplicaState.ValueType, *, has_led: bool
) -> None:
    """It is the only replica, so the hold-back rule would release it. A follower knows the engine by its lease."""
    rig = Rig()
    rig.lease(lease("a", "quarantined"))
    if has_led:
        rig.report("a", pb.REPLICA_STATE_QUARANTINED)
        rig.step()
        rig.lives.on_gone("a", "b1")
    rig.lease(lease("a", "starting", boot_id="b2"))
    rig.report("a", state, boot_id="b2")
    for _ in range(50):
        rig.step()
    orders = {each.order.state for each in rig.actions if isinstance(each, Order)}
    assert orders == {pb.REPLICA_STATE_QUARANTINED}
    assert not any(isinstance(each, RunJob) for each in rig.actions)


def test_a_new_engine_of_the_replica_is_warmed_up() -> None:
    """A quarantine ends with its engine."""
    rig = Rig()
    rig.lease(lease("a", "quarantined"))
    rig.report("a", pb.REPLICA_STATE_QUARANTINED)
    rig.step()
    rig.lease(lease("a", "starting", engine="e2"))
    rig.report("a", pb.REPLICA_STATE_STARTING, engine="e2")
    for _ in range(30):
        rig.step()
    orders = {each.order.state for each in rig.actions if isinstance(each, Order)}
    assert pb.REPLICA_STATE_SERVING in orders and pb.REPLICA_STATE_QUARANTINED not in orders


def test_one_serving_replica_makes_no_reference_beside_another_one() -> None:
    """The other has a lease and is held. It may be the right one, so it must not be judged by the first alone."""
    rig = Rig()
    rig.lease(lease("a", "serving"), lease("b", "starting"))
    rig.report("a", pb.REPLICA_STATE_SERVING)
    rig.report("b", pb.REPLICA_STATE_STARTING)
    rig.step()
    assert rig.answer("a", WRONG)
    for _ in range(10):
        rig.step()
        rig.answer("a", WRONG)
    assert rig.references.expected(KEY) == ()
    rig.lease(lease("a", "serving"), lease("b", "serving"))
    rig.report("b", pb.REPLICA_STATE_SERVING)
    rig.step()
    assert rig.answer("b", RIGHT)
    assert rig.references.expected(KEY) == (), "one against one: no vote decides"


def test_a_replica_without_others_makes_the_reference() -> None:
    """It is the only one of its version: a draining one and one that was found wrong do not count."""
    rig = Rig()
    leaving = Member(
        process_id="c",
        role="decode",
        address="c:1",
        boot_id="b1",
        model_version="v1",
        block_tokens=4,
        state="serving",
        draining=True,
        engine_boot_id="c-e1",
    )
    rig.lease(lease("a", "serving"), lease("b", "quarantined"), leaving)
    rig.report("a", pb.REPLICA_STATE_SERVING)
    for _ in range(2):
        rig.step()
        assert rig.answer("a", RIGHT)
    assert rig.references.expected(KEY) == RIGHT
