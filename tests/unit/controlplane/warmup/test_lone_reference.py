"""The golden tokens of a version with one serving decode replica: one run with a chance token condemns nothing."""

from __future__ import annotations

from controlplane.rollouts.golden import Answer, Prompt
from controlplane.warmup.actions import LifeAction, RunJob
from controlplane.warmup.bounds import ModelBounds
from controlplane.warmup.jobs import ProbeJob, ProbeResult, ReferenceJob, ReferenceResult
from controlplane.warmup.lives import Lives
from controlplane.warmup.packages import Packages
from controlplane.warmup.references import ReferenceKey, References
from controlplane.warmup.settings import WarmUpSettings
from controlplane.warmup.user_queues import UserQueues
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.life_state import LifeState
from kvmesh.membership.member import Member

NAME, KEY = "decode-0", ReferenceKey("v1", "build")
TOKENS = {(1, 2, 3): (9, 9), (4, 5): (8, 8)}
CHANCE = {(1, 2, 3): (9, 9), (4, 5): (8, 7)}


def test_a_token_that_differs_by_chance_in_one_run_makes_no_reference() -> None:
    actions: list[LifeAction] = []
    references = References(tuple(Prompt(each) for each in TOKENS), {})
    bounds = ModelBounds(64, 1000, {"decode": 100})
    lives = Lives(
        WarmUpSettings(),
        references,
        Packages(lambda: 0.0),
        lambda _pool: bounds,
        actions.append,
        lambda _package: None,
    )
    member = Member(
        process_id=NAME,
        role="decode",
        address="decode-0:1",
        boot_id="boot",
        model_version="v1",
        block_tokens=4,
        engine_boot_id="engine",
        capabilities=("life",),
        state="serving",
        digests={"engine": "build"},
    )
    lives.on_members([member], 0.0)
    report = pb.ReplicaLife(state=pb.REPLICA_STATE_SERVING, engine_boot_id="engine", self_served=True)
    lives.on_report(NAME, "boot", report, 0.0)
    runs, seen = 0, 0
    for step in range(600):
        now_s = 0.1 * step
        lives.step(UserQueues(), lambda _pool: (), now_s)
        begun, seen = actions[seen:], len(actions)
        for action in begun:
            if isinstance(action, RunJob) and isinstance(action.job, ReferenceJob):
                runs += 1
                given = CHANCE if runs == 1 else TOKENS
                answers = tuple(Answer(given[each.token_ids]) for each in action.job.prompts)
                lives.on_result(action.number, ReferenceResult(answers), now_s)
            elif isinstance(action, RunJob) and isinstance(action.job, ProbeJob):
                answers = tuple(Answer(TOKENS[each.token_ids]) for each in action.job.prompts)
                lives.on_result(action.number, ProbeResult(answers, True, 0, 0), now_s)
    life = lives.get(NAME)
    assert life is not None and life.state is LifeState.SERVING
    assert references.expected(KEY) == tuple(TOKENS.values())
    assert runs == 3, "two equal runs make the reference, and no further one follows"
