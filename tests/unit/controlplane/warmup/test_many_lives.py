"""The cost of a step of many lives: no life looks at all others, because the step runs on the leader's event loop."""

from __future__ import annotations

import pytest

from controlplane.rollouts.golden import Answer, Prompt
from controlplane.warmup.actions import LifeAction, RunJob
from controlplane.warmup.bounds import ModelBounds
from controlplane.warmup.fleet import Fleet
from controlplane.warmup.jobs import PassJob, PassResult, ProbeJob, ProbeResult
from controlplane.warmup.life import Life
from controlplane.warmup.life_steps import BACKGROUND_PROBES_MAX
from controlplane.warmup.lives import Lives
from controlplane.warmup.packages import Packages
from controlplane.warmup.references import ReferenceKey, References
from controlplane.warmup.settings import Seeding, WarmUpSettings
from controlplane.warmup.user_queues import UserQueues
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.life_state import LifeState
from kvmesh.membership.member import Member

LOOKS_PER_LIFE_MAX = 4
ROUTERS = (("router-0", "router-0:1"),)


@pytest.mark.parametrize("serving_percent", [0, 72])
def test_a_step_looks_at_each_life_a_few_times(serving_percent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    count, looks = 200, 0
    is_draining = Fleet.is_draining

    def counted(fleet: Fleet, life: Life) -> bool:
        nonlocal looks
        looks += 1
        return is_draining(fleet, life)

    monkeypatch.setattr(Fleet, "is_draining", counted)
    actions: list[LifeAction] = []
    bounds = ModelBounds(64, 1000, {"prefill": 100, "decode": 100})
    lives = Lives(
        WarmUpSettings(),
        References((Prompt((1, 2, 3)),), {}),
        Packages(lambda: 0.0),
        lambda _pool: bounds,
        actions.append,
        lambda _package: None,
    )
    members = [_lease(number) for number in range(count)]
    lives.on_members(members, 0.0)
    for number, member in enumerate(members):
        is_serving = 100 * number < serving_percent * count
        state = pb.REPLICA_STATE_SERVING if is_serving else pb.REPLICA_STATE_STARTING
        report = pb.ReplicaLife(state=state, engine_boot_id=member.engine_boot_id)
        lives.on_report(member.process_id, member.boot_id, report, 0.0)
    for step in range(40):  # two seconds: the bound of a short probe is among them
        looks = 0
        lives.step(UserQueues(), lambda _pool: ROUTERS, 0.1 * step)
        assert looks <= LOOKS_PER_LIFE_MAX * count, step
    assert actions


def _known_version(prompt: Prompt, tokens: tuple[int, ...], actions: list[LifeAction]) -> Lives:
    """Return the lives of a version with one golden prompt. `actions` takes what they ask for."""
    references = References((prompt,), {})
    references.restore(ReferenceKey("v1", "build"), (tokens,))
    return Lives(
        WarmUpSettings(seeding=Seeding.NONE),
        references,
        Packages(lambda: 0.0),
        lambda _pool: ModelBounds(64, 1000, {"prefill": 100, "decode": 100}),
        actions.append,
        lambda _package: None,
    )


def test_no_replica_is_probed_again_before_each_other_was_probed() -> None:
    """A new leader finds all of them cold, and their prefill gives no answer. The last by name waits no longer."""
    actions: list[LifeAction] = []
    members = [_lease(number) for number in range(100)]
    lives = _known_version(Prompt((1, 2, 3), 2), (1, 2), actions)
    lives.on_members(members, 0.0)
    for member in members:
        report = pb.ReplicaLife(state=pb.REPLICA_STATE_SERVING, engine_boot_id=member.engine_boot_id)
        lives.on_report(member.process_id, member.boot_id, report, 0.0)
    asked, ends = dict[str, int](), dict[int, float]()
    for step in range(120):
        now_s = 0.25 * step
        for number in [number for number, end_s in ends.items() if end_s <= now_s]:
            del ends[number]
            lives.on_result(number, ProbeResult((Answer(error="late"),)), now_s)
        lives.step(UserQueues(), lambda _pool: (), now_s)
        for each in actions:
            if isinstance(each, RunJob) and isinstance(each.job, ProbeJob):
                name = each.job.target.process_id
                asked[name], ends[each.number] = asked.get(name, 0) + 1, now_s + 1.75
        actions.clear()
        assert max(asked.values()) == 1 or len(asked) == len(members)
    assert min(asked.values()) > 1


def test_probes_of_serving_replicas_are_bounded_over_the_fleet() -> None:
    """A new leader finds all replicas unproved. It probes them in turn, and a fresh one at once."""
    actions: list[LifeAction] = []
    members = [_lease(number) for number in range(200)]
    lives = _known_version(Prompt((1, 2, 3)), (1,), actions)
    lives.on_members(members, 0.0)
    for number, member in enumerate(members):
        state = pb.REPLICA_STATE_SERVING if number else pb.REPLICA_STATE_STARTING
        report = pb.ReplicaLife(state=state, engine_boot_id=member.engine_boot_id)
        lives.on_report(member.process_id, member.boot_id, report, 0.0)
    asked: set[str] = set()
    now_s, running = 0.0, list[RunJob]()
    while len(asked) < len(members) and now_s < 600.0:
        now_s += 1.0
        lives.step(UserQueues(), lambda _pool: (), now_s)
        running += [each for each in actions if isinstance(each, RunJob)]
        actions.clear()
        assert len(running) <= BACKGROUND_PROBES_MAX + 1
        for each in running:
            assert isinstance(each.job, PassJob | ProbeJob)
            asked.add(each.job.target.process_id)
            result = (
                PassResult(1.0, 0)
                if isinstance(each.job, PassJob)
                else ProbeResult(tuple(Answer((1,)) for _ in each.job.prompts), frees_blocks=True)
            )
            lives.on_result(each.number, result, now_s)
        running.clear()
        if now_s == 1.0:
            assert members[0].process_id in asked and len(asked) <= BACKGROUND_PROBES_MAX + 1
    assert len(asked) == len(members)


def test_a_wrong_replica_in_service_is_found_beside_long_passes_of_many() -> None:
    """Passes of held replicas take minutes. They count for nothing here."""
    actions: list[LifeAction] = []
    members = [_lease(number) for number in range(200)]
    lives = _known_version(Prompt((1, 2, 3)), (1,), actions)
    lives.on_members(members, 0.0)
    for number, member in enumerate(members):
        state = pb.REPLICA_STATE_SERVING if number >= 40 else pb.REPLICA_STATE_STARTING
        report = pb.ReplicaLife(state=state, engine_boot_id=member.engine_boot_id)
        lives.on_report(member.process_id, member.boot_id, report, 0.0)
    wrong, now_s, life_state = members[-1].process_id, 0.0, LifeState.STARTING
    while now_s < 20.0 and life_state is not LifeState.QUARANTINED:
        now_s += 1.0
        lives.step(UserQueues(), lambda _pool: (), now_s)
        probes = [each for each in actions if isinstance(each, RunJob) and isinstance(each.job, ProbeJob)]
        actions.clear()
        for each in probes:
            assert isinstance(each.job, ProbeJob)
            token = 9 if each.job.target.process_id == wrong else 1
            answers = tuple(Answer((token,)) for _ in each.job.prompts)
            lives.on_result(each.number, ProbeResult(answers, frees_blocks=True), now_s)
        life = lives.get(wrong)
        assert life is not None
        life_state = life.state
    assert life_state is LifeState.QUARANTINED


def _lease(number: int) -> Member:
    role = "prefill" if number % 2 else "decode"
    return Member(
        process_id=f"{role}-{number}",
        role="prefill" if number % 2 else "decode",
        address=f"{role}-{number}:1",
        boot_id=f"boot-{number}",
        model_version="v1",
        block_tokens=4,
        kv_address=f"kv:{number}",
        engine_boot_id=f"engine-{number}",
        capabilities=("life",),
        digests={"engine": "build"},
    )
