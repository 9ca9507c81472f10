"""Golden prompts of shapes that the warm-up left out: they would be cold, at the cost of users who run other shapes."""

from __future__ import annotations

import pytest

from controlplane.rollouts.golden import LENGTHS, Answer, fixed_prompts
from controlplane.warmup.actions import LifeAction, RunJob
from controlplane.warmup.bounds import ModelBounds
from controlplane.warmup.jobs import PassJob, PassResult, ProbeJob, ProbeResult
from controlplane.warmup.life import WARM_BY_SERVICE_S
from controlplane.warmup.life_steps import BACKGROUND_RETRY_S
from controlplane.warmup.lives import Lives
from controlplane.warmup.packages import Package, Packages, ShapeRow, package_name
from controlplane.warmup.prompt_choice import (
    QUICK_PROMPTS,
    held_positions,
    largest_position,
    proving_lengths,
    quick_positions,
)
from controlplane.warmup.references import ReferenceKey, References
from controlplane.warmup.settings import Seeding, WarmUpSettings
from controlplane.warmup.user_queues import UserQueues
from kvmesh.control.v1 import snapshot_pb2 as pb
from tests.unit.controlplane.warmup.leases import lease

KEY = ReferenceKey("v1", "")
PROMPTS = fixed_prompts(256, 1024)
TOKENS = tuple((at,) for at in range(len(PROMPTS)))
NAME = "prefill-0"
PEERS = ("prefill-1", "prefill-2", "prefill-3")


def _report(name: str, state: pb.ReplicaState.ValueType) -> pb.ReplicaLife:
    return pb.ReplicaLife(state=state, engine_boot_id=f"{name}-e1")


def probes(shapes: tuple[int, ...], peers: tuple[str, ...] = PEERS, delay_s: float = 0.0) -> list[ProbeJob]:
    """As `timed_probes`, without the times."""
    return [job for _, job in timed_probes(shapes, peers, delay_s)]


def timed_probes(
    shapes: tuple[int, ...],
    peers: tuple[str, ...] = PEERS,
    delay_s: float = 0.0,
    until_s: float = float("inf"),
    handoffs_failed: int = 0,
) -> list[tuple[float, ProbeJob]]:
    """Warm up a prefill by a package of `shapes`, and return its probes, those of two minutes in service included.

    `peers`: replicas in service. Without one its pool needs the prefill at once. `delay_s`: queue delay of the pool, which
    ends at `until_s`. `handoffs_failed`: of each probe.
    """
    actions: list[LifeAction] = []
    references, packages = References(PROMPTS, {}), Packages(lambda: 0.0)
    references.restore(KEY, TOKENS)
    if shapes:
        packages.adopt(
            Package(
                name=package_name("prefill", KEY),
                model_version="v1",
                role="prefill",
                shapes=tuple(ShapeRow(each) for each in shapes),
            )
        )
    lives = Lives(
        WarmUpSettings(seeding=Seeding.NONE),
        references,
        packages,
        lambda _: ModelBounds(2048, 256, {"prefill": 100}),
        actions.append,
        lambda _: None,
    )
    lives.on_members(
        (lease(NAME, "starting", "prefill"), *(lease(each, "serving", "prefill") for each in peers)), 0.0
    )
    for name in peers:
        lives.on_report(name, "b1", _report(name, pb.REPLICA_STATE_SERVING), 0.0)
    lives.on_report(NAME, "b1", _report(NAME, pb.REPLICA_STATE_STARTING), 0.0)
    now_s, found = 0.0, list[tuple[float, ProbeJob]]()
    while now_s < 4 * BACKGROUND_RETRY_S:
        now_s += 1.0
        queues = UserQueues({"default": delay_s if now_s < until_s else 0.0})
        lives.step(queues, lambda _: (), now_s)
        jobs = [each for each in actions if isinstance(each, RunJob)]
        actions.clear()
        for each in jobs:
            if isinstance(each.job, PassJob):
                lives.on_result(each.number, PassResult(1.0, 0), now_s)
            elif isinstance(each.job, ProbeJob):
                if each.job.target.process_id == NAME:
                    found.append((now_s, each.job))
                answers = tuple(Answer(TOKENS[PROMPTS.index(prompt)]) for prompt in each.job.prompts)
                result = ProbeResult(answers, frees_blocks=True, handoffs_failed=handoffs_failed)
                lives.on_result(each.number, result, now_s)
    return found


@pytest.mark.parametrize("shapes", [(64, 128), (512, 64, 128), (2, 4, 8, 16, 32, 64)])
def test_only_prompts_of_warmed_shapes_run(shapes: tuple[int, ...]) -> None:
    """All of them run, held or in service."""
    ran = {len(prompt.token_ids) for job in probes(shapes) for prompt in job.prompts}
    wanted = {len(prompt.token_ids) for prompt in PROMPTS}
    assert ran == {each for each in wanted if 1 << (each - 1).bit_length() in shapes}


def test_a_replica_that_its_pool_needs_runs_the_shapes_of_its_users() -> None:
    """It is cold. Any other shape would cost its users the steps that they never meet."""
    ran = {len(prompt.token_ids) for job in probes((64, 128), peers=()) for prompt in job.prompts}
    assert ran == {each for each in map(len, (each.token_ids for each in PROMPTS)) if 32 < each <= 128}


def test_all_prompts_run_without_a_package() -> None:
    """The default shapes cover every length."""
    ran = {len(prompt.token_ids) for job in probes(()) for prompt in job.prompts}
    assert ran == {len(prompt.token_ids) for prompt in PROMPTS}


def test_a_prefill_runs_one_prompt_at_a_time() -> None:
    """Its engine would pack them into steps of other shapes."""
    assert {each.running_max for each in probes((64, 128, 256))} == {1}


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [((64, 128), 128), ((2, 4, 8, 16, 32, 64), 64), ((16, 64, 512), 512), ((512, 1024), 512)],
)
def test_the_prompt_of_a_replica_that_its_pool_needs_has_the_largest_shape(
    lengths: tuple[int, ...], shape: int
) -> None:
    """A queue fills the steps of an engine, so its users meet that shape first."""
    (first, *_) = probes(lengths, peers=())
    (prompt,) = first.prompts
    assert shape // 2 < len(prompt.token_ids) <= shape
    assert largest_position(PROMPTS, frozenset((1024,))) == ()


def test_prompts_prove_a_replica_whose_users_send_longer_ones() -> None:
    """No golden prompt has a shape of its users. The longest ones run, not the few tokens of the shortest."""
    ran = {len(prompt.token_ids) for job in probes((1024, 2048), peers=()) for prompt in job.prompts}
    assert ran == {each for each in map(len, (each.token_ids for each in PROMPTS)) if each > 256}
    assert proving_lengths(PROMPTS[-3:], frozenset((64,))) == {512}
    assert proving_lengths(PROMPTS, frozenset()) == frozenset()


def test_quick_prompts_have_all_lengths() -> None:
    """An engine that served before is warm for all of them."""
    held = held_positions(PROMPTS)
    chosen = quick_positions(held)
    assert len(chosen) == QUICK_PROMPTS and chosen[0] == held[0] and chosen[-1] > held[len(held) // 2]


@pytest.mark.parametrize(("delay_s", "seconds"), [(0.0, 3.0), (5.0, WARM_BY_SERVICE_S)])
def test_a_queue_goes_before_the_golden_prompts_of_a_cold_replica(delay_s: float, seconds: float) -> None:
    """For a while only: a wrong engine must be found."""
    began = timed_probes((64, 128), (), delay_s)
    later = [at_s for at_s, _ in began if at_s > 2.5]
    assert later and (min(later) <= seconds + 2.5) and (delay_s == 0.0 or min(later) >= seconds)


@pytest.mark.parametrize("until_s", [2.0, 6.0, 15.0])
def test_golden_prompts_cost_the_users_of_a_cold_replica_no_step(until_s: float) -> None:
    """Users waited for it, and warm it up. After one prompt of the shape that a queue fills, the others wait for that."""
    first, *later = timed_probes((64, 128), (), 5.0, until_s)
    (known,) = first[1].prompts
    assert 64 < len(known.token_ids) <= 128
    assert min(at_s for at_s, _ in later) >= first[0] + WARM_BY_SERVICE_S
    ran = {len(prompt.token_ids) for _, job in later for prompt in job.prompts}
    assert ran == {length for length in LENGTHS if 32 < length <= 128} - {len(known.token_ids)}


@pytest.mark.parametrize("delay_s", [0.0, 5.0])
@pytest.mark.parametrize("peers", [(), PEERS])
def test_a_probe_is_repeated_with_prompts_of_warmed_shapes(peers: tuple[str, ...], delay_s: float) -> None:
    """Its handoffs fail under load. The shortest prompts would be cold."""
    all_probes = timed_probes((64, 128), peers, delay_s, handoffs_failed=1)
    assert len(all_probes) > 3
    assert all(32 < len(prompt.token_ids) <= 128 for _, job in all_probes for prompt in job.prompts)


@pytest.mark.parametrize("is_self_served", [False, True])
def test_a_new_leader_leaves_a_cold_replica_to_its_users(is_self_served: bool) -> None:
    """It serves unproved, by an order of an earlier leader or by itself. One golden prompt runs, the others later."""
    actions: list[LifeAction] = []
    references = References(PROMPTS, {})
    references.restore(KEY, TOKENS)
    lives = Lives(
        WarmUpSettings(seeding=Seeding.NONE),
        references,
        Packages(lambda: 0.0),
        lambda _: ModelBounds(2048, 256, {"prefill": 100}),
        actions.append,
        lambda _: None,
    )
    lives.on_members((lease(NAME, "starting" if is_self_served else "serving", "prefill"),), 0.0)
    if is_self_served:
        lives.on_report(NAME, "b1", _report(NAME, pb.REPLICA_STATE_STARTING), 0.0)
    lives.on_report(NAME, "b1", _report(NAME, pb.REPLICA_STATE_SERVING), 0.0)

    def lengths(now_s: float, queue_s: float) -> set[int]:
        lives.step(UserQueues(replicas={NAME: queue_s}), lambda _: (), now_s)
        jobs = [each.job for each in actions if isinstance(each, RunJob) and isinstance(each.job, ProbeJob)]
        return {len(prompt.token_ids) for job in jobs for prompt in job.prompts}

    (first,) = lengths(1.0, 5.0)
    assert first > 256, "nothing has passed yet: one prompt of the largest shape runs beside the users"
    number = next(each.number for each in actions if isinstance(each, RunJob))
    right = Answer(TOKENS[[len(each.token_ids) for each in PROMPTS].index(first)])
    lives.on_result(number, ProbeResult((right,), frees_blocks=True), 2.0)
    actions.clear()
    assert not lengths(5.0, 0.0) and not lengths(WARM_BY_SERVICE_S - 0.5, 0.0)
    assert lengths(WARM_BY_SERVICE_S + 3.0, 0.0) == set(LENGTHS) - {first}
