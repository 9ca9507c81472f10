"""Which prefill computes the prompts of a decode's warm-up."""

from __future__ import annotations

import pytest

from controlplane.rollouts.golden import Answer, fixed_prompts
from controlplane.shadow.before_rollout import PROOF_MAX_S
from controlplane.warmup.actions import CancelJob, LifeAction, RunJob
from controlplane.warmup.bounds import ModelBounds
from controlplane.warmup.jobs import SOURCE_S, PassJob, PassResult, ProbeJob, ProbeResult, SeedJob
from controlplane.warmup.life import WARM_BY_SERVICE_S, Life
from controlplane.warmup.life_steps import BACKGROUND_RETRY_S, HURRIED_S
from controlplane.warmup.lives import Lives
from controlplane.warmup.packages import Package, Packages, ShapeRow, package_name
from controlplane.warmup.prompt_choice import (
    HELD_PROMPT_TOKENS_MAX,
    PARTS,
    QUICK_PROMPTS,
    RUNNING_MAX,
    WARM_PROMPTS_MAX,
)
from controlplane.warmup.references import ReferenceKey, References
from controlplane.warmup.settings import Mode, Seeding, WarmUpSettings
from controlplane.warmup.user_queues import UserQueues
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.membership.member import Member
from tests.unit.controlplane.warmup.leases import lease

PROMPTS = fixed_prompts(256, 1024)
TOKENS = tuple((at, at) for at in range(len(PROMPTS)))
NAME = "decode-0"


class Rig:
    """A decode that starts beside serving replicas."""

    def __init__(
        self,
        *serving: str,
        batches: tuple[int, ...] = (),
        lengths: tuple[int, ...] = (),
        prefixes: tuple[tuple[int, ...], ...] = (),
        seeding: Seeding = Seeding.NONE,
        mode: Mode = Mode.FULL,
        probing_max_s: float = 20.0,
        name: str = NAME,
    ) -> None:
        """`batches`, `lengths`: shapes of the package; none: there is no package. `prefixes`: its prefixes.

        `name`: of the fresh replica.
        """
        self.name = name
        self.actions: list[LifeAction] = []
        self.now_s = 0.0
        self.queues = UserQueues()
        references = References(PROMPTS, {})
        references.restore(ReferenceKey("v1", ""), TOKENS)
        packages = Packages(lambda: 0.0)
        if batches or lengths:
            packages.adopt(
                Package(
                    name=package_name("decode", ReferenceKey("v1", "")),
                    model_version="v1",
                    role="decode",
                    shapes=(*(ShapeRow(8, each) for each in batches), *map(ShapeRow, lengths)),
                    prefixes=prefixes,
                )
            )
        self.lives = Lives(
            WarmUpSettings(mode=mode, seeding=seeding, probing_max_s=probing_max_s),
            references,
            packages,
            lambda _: ModelBounds(2048, 256, {"decode": 100}, 64),
            self.actions.append,
            lambda _: None,
        )
        self.lives.on_members(
            (_member(name, "starting"), *(_member(each, "serving") for each in serving)), 0.0
        )
        for each in serving:
            self.report(each, pb.REPLICA_STATE_SERVING)
        self.report(name, pb.REPLICA_STATE_STARTING)

    @property
    def life(self) -> Life:
        """The life of the fresh replica."""
        life = self.lives.get(self.name)
        assert life is not None
        return life

    def report(self, name: str, state: pb.ReplicaState.ValueType, engine: str = "e1") -> None:
        """Take the report of a replica."""
        life = pb.ReplicaLife(state=state, engine_boot_id=f"{name}-{engine}")
        self.lives.on_report(name, "b1", life, self.now_s)

    def proves(self, pools: set[str]) -> bool:
        """True if a shadow before a rollout waits for replicas of `pools`."""
        return self.lives.proves(pools, self.now_s, PROOF_MAX_S)

    def next_job(self) -> tuple[int, PassJob | ProbeJob]:
        """Let time go on until the fresh decode has a job. Those of the others never end."""
        for _ in range(100):
            self.step()
            for each in list(self.actions):
                self.actions.remove(each)
                if not isinstance(each, RunJob) or not isinstance(each.job, PassJob | ProbeJob):
                    continue
                if each.job.target.process_id == self.name:
                    return each.number, each.job
        raise AssertionError("no job")

    def step(self) -> None:
        """Let time go on."""
        self.now_s += 0.5
        self.lives.step(self.queues, lambda _: (), self.now_s)

    def pass_by(self, seconds: float) -> None:
        """Let at least `seconds` go by."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.step()

    def serve_late(self) -> tuple[int, ProbeJob]:
        """Let users wait until the fresh replica serves without an answer. Return its probe, which goes on."""
        self.queues = UserQueues(unplaced=frozenset({"default"}))
        number, job = self.probe()
        for _ in range(20):
            if not self.life.serves:
                self.step()
        assert self.life.serves and self.life.job == number
        return number, job

    def cancelled(self) -> list[int]:
        """Return the numbers of the jobs that were cancelled."""
        return [each.number for each in self.actions if isinstance(each, CancelJob)]

    def probe(self) -> tuple[int, ProbeJob]:
        """End the passes, and return the first probe."""
        while True:
            number, job = self.next_job()
            if isinstance(job, ProbeJob):
                return number, job
            self.lives.on_result(number, PassResult(1.0, 0), self.now_s)


def _member(name: str, state: str) -> Member:
    is_decode = name.startswith("decode")
    return lease(
        name,
        state,
        role="decode" if is_decode else "prefill",
        kv_address="" if is_decode else f"{name}:2",
    )


def _right(job: ProbeJob) -> tuple[Answer, ...]:
    return tuple(Answer(TOKENS[PROMPTS.index(each)]) for each in job.prompts)


SERVING = ("decode-1", "decode-2", "decode-3", "prefill-0")


def test_a_serving_prefill_computes_the_prompts_of_batches_and_golden_prompts() -> None:
    """The pass leaves out prompts that routers never leave to a decode. The golden prompts are one batch."""
    rig = Rig(*SERVING)
    _, passed = rig.next_job()
    assert isinstance(passed, PassJob) and passed.source is not None
    assert passed.source.process_id == "prefill-0"
    assert max(each.prompt_tokens for each in passed.shapes if each.batch == 1) <= 64
    _, probe = Rig(*SERVING).probe()
    assert probe.source == passed.source
    assert len(probe.prompts) == probe.running_max == WARM_PROMPTS_MAX


def test_without_a_prefill_the_decode_computes_all_prompts() -> None:
    """Its pool may have none that serves."""
    rig = Rig(*SERVING[:-1])
    _, passed = rig.next_job()
    assert isinstance(passed, PassJob) and passed.source is None
    assert max(each.prompt_tokens for each in passed.shapes) == 2048
    assert Rig(*SERVING[:-1]).probe()[1].source is None


def test_prompts_that_were_not_run_or_gave_wrong_tokens_run_at_the_decode_alone() -> None:
    """A prefill that fails neither holds a decode back, nor has one quarantined."""
    rig = Rig(*SERVING)
    number, job = rig.probe()
    rig.lives.on_result(number, ProbeResult(tuple(Answer(error="lost") for _ in job.prompts)), rig.now_s)
    number, job = rig.probe()
    assert job.source is None
    rig = Rig(*SERVING)
    number, job = rig.probe()
    wrong = (Answer((9, 9)), *_right(job)[1:])
    rig.lives.on_result(number, ProbeResult(wrong, frees_blocks=True), rig.now_s)
    number, again = rig.probe()
    assert again.source is None and again.prompts == job.prompts[:1]
    rig.lives.on_result(number, ProbeResult(_right(again), frees_blocks=True), rig.now_s)
    rig.lives.step(UserQueues(), lambda _: (), rig.now_s + 1.0)
    life = rig.lives.get(NAME)
    assert life is not None and life.serves and life.is_proved


def test_a_package_of_large_batches_runs_without_a_prefill() -> None:
    """No batch of it is small enough for golden prompts, so they run a few at a time."""
    rig = Rig(*SERVING[:-1], batches=(16, 64))
    _, job = rig.probe()
    assert job.source is None and job.running_max == RUNNING_MAX


def test_a_bound_without_a_proof_ends_the_work_with_a_prefill() -> None:
    """A prefill that hangs takes the whole bound. The decode is probed alone in service."""
    rig = Rig(*SERVING)
    rig.probe()
    rig.now_s += WarmUpSettings().probing_max_s
    _, job = rig.probe()
    life = rig.lives.get(NAME)
    assert life is not None and life.serves and job.source is None


@pytest.mark.parametrize("lengths", [(1, 2, 4, 8, 16, 32, 64), (64,)])
def test_a_decode_that_computes_its_prompts_runs_those_that_are_warm_there(lengths: tuple[int, ...]) -> None:
    """Its passes ran the prompts that routers leave to it."""
    rig = Rig(*SERVING, lengths=lengths)
    number, job = rig.probe()
    rig.lives.on_result(number, ProbeResult(tuple(Answer(error="lost") for _ in job.prompts)), rig.now_s)
    ran = set[int]()
    for _ in range(6):
        number, job = rig.probe()
        assert job.source is None
        ran |= {len(each.token_ids) for each in job.prompts}
        rig.lives.on_result(number, ProbeResult(_right(job), frees_blocks=True), rig.now_s)
        rig.now_s += 31.0
        rig.lives.step(UserQueues(), lambda _: (), rig.now_s)
        life = rig.lives.get(NAME)
        assert life is not None
        if life.is_proved:
            break
    assert {1 << (each - 1).bit_length() for each in ran} <= set(lengths)


def test_a_replica_that_its_pool_needs_runs_one_golden_prompt() -> None:
    """Its engine may be cold, and its users wait."""
    rig = Rig("prefill-0")
    _, job = rig.probe()
    assert len(job.prompts) == 1 and not job.checks_cancel and not job.peers


def test_a_pool_proves_itself_until_its_last_replica_is_proved() -> None:
    """Held or in service. Another pool counts for nothing."""
    rig = Rig()
    life = rig.lives.get(NAME)
    assert life is not None
    pools = {life.target.pool}
    assert rig.proves(pools) and not rig.proves({"other"})
    for _ in range(20):
        if not rig.proves(pools):
            break
        number, job = rig.next_job()
        result = (
            ProbeResult(_right(job), frees_blocks=True) if isinstance(job, ProbeJob) else PassResult(1.0, 0)
        )
        rig.lives.on_result(number, result, rig.now_s)
        rig.now_s += 31.0
        rig.lives.step(UserQueues(), lambda _: (), rig.now_s)
    assert life.is_proved and not rig.proves(pools)


def test_a_replica_without_a_proof_is_waited_for_a_while_from_its_start_of_service() -> None:
    """Also if it came late. A replica that leaves service, or a mesh without warm-up, is not waited for."""
    rig = Rig()
    rig.now_s = 1000.0
    life = rig.lives.get(NAME)
    assert life is not None
    pools = {life.target.pool}
    while not life.serves:
        rig.now_s += 1.0
        rig.lives.step(UserQueues(), lambda _: (), rig.now_s)
    assert not life.is_proved and rig.proves(pools)
    rig.lives.on_members((_member(NAME, "draining"),), rig.now_s)
    assert not rig.proves(pools)
    rig.lives.on_members((_member(NAME, "serving"),), rig.now_s)
    rig.now_s = life.since_s + PROOF_MAX_S - 0.1
    assert rig.proves(pools)
    rig.now_s += 0.2
    assert not rig.proves(pools)
    off = Rig(mode=Mode.NONE)
    assert not off.proves({life.target.pool})


def test_a_prompt_without_an_answer_runs_again() -> None:
    """The answers beside it count, and it runs until it has one."""
    rig = Rig(*SERVING[:-1])
    life = rig.lives.get(NAME)
    assert life is not None
    missed, runs = PROMPTS[-1], 0
    while runs < 3:
        number, job = rig.probe()
        runs += missed in job.prompts
        answers = tuple(
            Answer(error="late") if each == missed and runs < 3 else answer
            for each, answer in zip(job.prompts, _right(job), strict=True)
        )
        rig.lives.on_result(number, ProbeResult(answers, frees_blocks=True), rig.now_s)
        ran = {PROMPTS.index(each) for each in job.prompts}
        assert ran & life.passed == ran - ({len(PROMPTS) - 1} if runs < 3 else set())


def test_a_known_engine_is_proved_with_the_check_of_a_cancel() -> None:
    """Its service alone was started anew, and a release may keep the blocks of cancelled requests."""
    rig = Rig(*SERVING)
    life = rig.lives.get(NAME)
    assert life is not None
    life.is_known_engine = True
    _, job = rig.probe()
    assert job.checks_cancel and len(job.prompts) == QUICK_PROMPTS


@pytest.mark.parametrize("seeding", [Seeding.PULL, Seeding.REPLAY])
def test_a_decode_beside_prefill_replicas_is_not_seeded(seeding: Seeding) -> None:
    """Handoffs fill its cache. Further copies of KV blocks would delay them."""
    rig = Rig(*SERVING, batches=(4,), prefixes=((1,) * 8,), seeding=seeding)
    life = rig.lives.get(NAME)
    assert life is not None
    assert seedings(rig) == [] and life.serves and life.is_seeded


@pytest.mark.parametrize("seeding", [Seeding.PULL, Seeding.REPLAY])
def test_a_decode_without_prefill_replicas_computes_prefixes_in_service(seeding: Seeding) -> None:
    """It computes the prompts of its users, too."""
    rig = Rig(*SERVING[:-1], batches=(4,), prefixes=((1,) * 8,), seeding=seeding)
    found = seedings(rig)
    assert found and all(serves for serves, _ in found)
    assert all(job.package_prefixes and not job.sources for _, job in found)
    assert all(job.is_replay == (seeding is Seeding.REPLAY) for _, job in found)


def test_a_decode_that_comes_into_service_late_is_seeded() -> None:
    """Its golden prompts may take longer than a seeding."""
    rig = Rig(*SERVING[:-1], batches=(4,), prefixes=((1,) * 8,), seeding=Seeding.PULL, probing_max_s=300.0)
    assert len(seedings(rig, hold_s=200.0)) == 1


def test_a_decode_that_users_waited_for_is_not_seeded() -> None:
    """Its users fill its cache."""
    rig = Rig(*SERVING[:-1], batches=(4,), prefixes=((1,) * 8,), seeding=Seeding.PULL)
    life = rig.lives.get(NAME)
    assert life is not None
    life.is_awaited = True
    assert seedings(rig) == [] and life.serves and life.is_seeded


@pytest.mark.parametrize("is_awaited", [False, True])
@pytest.mark.parametrize("cold", [(), ("prefill-1",), ("prefill-1", "prefill-2")])
def test_a_cold_prefill_is_no_source_where_users_wait(cold: tuple[str, ...], is_awaited: bool) -> None:
    """A pull costs its source a step of one token: a cold shape beside the users. They fill both caches."""
    rig = Rig("prefill-1", "prefill-2", name="prefill-0", seeding=Seeding.PULL)
    rig.life.is_awaited = is_awaited
    warm = {"prefill-1", "prefill-2"} - set(cold)
    sources = warm if is_awaited else {"prefill-1", "prefill-2"}
    for name in ("prefill-1", "prefill-2"):
        life = rig.lives.get(name)
        assert life is not None
        life.is_awaited, life.is_proved = True, name in warm
        assert life.is_left_to_users(rig.now_s) == (name in cold)
    found = seedings(rig)
    assert [{each.process_id for each in job.sources} for _, job in found] == ([sources] if sources else [])


def seedings(rig: Rig, hold_s: float = 0.0) -> list[tuple[bool, SeedJob]]:
    """Return the seedings of the fresh replica, and whether it served then. `hold_s`: time of its first probe."""
    routers, found = (("router-0", "router-0:1"),), list[tuple[bool, SeedJob]]()
    until_s = rig.now_s + hold_s + 20.0
    while rig.now_s < until_s:
        rig.now_s += 0.5
        rig.lives.step(UserQueues(), lambda _: routers, rig.now_s)
        jobs = [each for each in rig.actions if isinstance(each, RunJob)]
        rig.actions.clear()
        for each in jobs:
            job = each.job
            if isinstance(job, SeedJob) and job.target.process_id == rig.name:
                found.append((rig.life.serves, job))
            elif isinstance(job, PassJob):
                rig.lives.on_result(each.number, PassResult(1.0, 0), rig.now_s)
            elif isinstance(job, ProbeJob) and job.target.process_id == rig.name:
                rig.now_s, hold_s = rig.now_s + hold_s, 0.0
                rig.lives.on_result(each.number, ProbeResult(_right(job), frees_blocks=True), rig.now_s)
    return found


@pytest.mark.parametrize("wrong_tokens", [(31, 32), (1, 2), (127, 128)])
def test_wrong_tokens_behind_the_largest_shape_are_found(wrong_tokens: tuple[int, ...]) -> None:
    """Users waited for the decode, so prompts of its largest shape prove it first. Its own shapes have no prompt left."""
    rig = Rig("prefill-0", batches=(2, 4))
    number, job = rig.probe()
    life = rig.lives.get(NAME)
    assert life is not None and life.is_hurried
    life.is_awaited = True
    for _ in range(20):
        answers = tuple(
            Answer((9, 9)) if len(prompt.token_ids) in wrong_tokens else answer
            for prompt, answer in zip(job.prompts, _right(job), strict=True)
        )
        rig.lives.on_result(number, ProbeResult(answers, frees_blocks=True), rig.now_s)
        assert not life.is_proved
        if life.state.name == "QUARANTINED":
            break
        number, job = rig.probe()
    assert life.state.name == "QUARANTINED"
    assert rig.now_s < WARM_BY_SERVICE_S + (PARTS + 1) * BACKGROUND_RETRY_S


@pytest.mark.parametrize("is_awaited", [False, True])
def test_a_decode_short_of_time_leaves_its_prompts_to_the_prefill(is_awaited: bool) -> None:
    """Prompts of its own would have cold shapes. Only without any answer may the prefill be the cause."""
    rig = Rig(*SERVING) if not is_awaited else Rig("prefill-0")
    number, job = rig.probe()
    life = rig.lives.get(NAME)
    assert life is not None
    life.is_awaited = is_awaited
    right = () if is_awaited else _right(job)[:1]
    late = tuple(Answer(error="late") for _ in job.prompts[len(right) :])
    rig.lives.on_result(number, ProbeResult((*right, *late)), rig.now_s)
    assert rig.probe()[1].source is not None


@pytest.mark.parametrize(
    ("batches", "runs"), [((), WARM_PROMPTS_MAX), ((2,), 2), ((2, 64), WARM_PROMPTS_MAX)]
)
def test_golden_prompts_of_a_decode_that_users_wait_for_make_a_batch(
    batches: tuple[int, ...], runs: int
) -> None:
    """One prompt alone would be a cold step of a shape that a queue of users seldom meets. The batch is recorded work."""
    rig = Rig("prefill-0", batches=batches)
    rig.queues = UserQueues(unplaced=frozenset({"default"}))
    _, job = rig.probe()
    assert (len(job.prompts), job.running_max) == (runs, max(runs, RUNNING_MAX))
    assert job.source is not None and not job.checks_cancel
    assert all(len(prompt.token_ids) <= HELD_PROMPT_TOKENS_MAX for prompt in job.prompts)


def test_a_decode_without_an_answer_in_time_is_probed_in_full_later() -> None:
    """Users waited for it. Its batch goes on in service; handoffs with its peers follow after 30 s."""
    rig = Rig("prefill-0")
    number, job = rig.serve_late()
    assert not rig.cancelled() and job.end_s - rig.life.since_s >= 10.0
    rig.lives.on_result(number, ProbeResult(_right(job)), rig.now_s)
    began_s = rig.now_s
    _, job = rig.probe()
    assert rig.now_s - began_s >= WARM_BY_SERVICE_S - 10.0 and not rig.life.is_cold(rig.now_s)
    assert job.peers and len(job.prompts) == len(PROMPTS) // PARTS and job.source is not None


def test_a_decode_without_an_answer_runs_its_batch_until_it_has_one() -> None:
    """It serves, and nothing shows that its tokens are right. One prompt alone would be a cold step beside its users."""
    rig = Rig("prefill-0")
    number, job = rig.serve_late()
    pauses, late = list[float](), tuple(Answer(error="late") for _ in job.prompts)
    for _ in range(4):
        rig.lives.on_result(number, ProbeResult(late), rig.now_s)
        ended_s = rig.now_s
        number, job = rig.probe()
        pauses.append(rig.now_s - ended_s)
        assert job.source is not None and job.source_s == SOURCE_S and not job.peers
        assert len(job.prompts) == job.running_max == WARM_PROMPTS_MAX
    assert pauses == [1.0, 2.0, 4.0, 8.0]
    rig.lives.on_result(number, ProbeResult((*_right(job)[:1], *late[1:])), rig.now_s)
    assert rig.life.is_left_to_users(rig.now_s)
    rig.probe()
    assert not rig.life.is_left_to_users(rig.now_s), "one answer, and its users come first"


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_prefill_that_is_slow_for_the_users_of_a_decode_is_not_blamed(is_warm: bool) -> None:
    """No answer comes while users wait. The decode would compute the prompts itself from then on, in cold shapes."""
    rig = Rig("prefill-0") if not is_warm else Rig(*SERVING)
    number, job = rig.serve_late() if not is_warm else rig.probe()
    if is_warm:
        rig.queues = UserQueues({"default": 5.0})
        rig.step()
        rig.pass_by(HURRIED_S)
        assert rig.life.serves and not rig.life.is_cold(rig.now_s)
    while rig.life.age_s(rig.now_s) < WARM_BY_SERVICE_S:
        late = tuple(Answer(error="late") for _ in job.prompts)
        rig.pass_by(1.5)
        rig.lives.on_result(number, ProbeResult(late), rig.now_s)
        number, job = rig.probe()
        assert job.source is not None and not rig.life.runs_alone


def test_no_batch_begins_so_late_that_its_steps_meet_users() -> None:
    """The first one failed at the prefill. The next one runs in service."""
    rig = Rig("prefill-0")
    rig.queues = UserQueues(unplaced=frozenset({"default"}))
    number, job = rig.probe()
    rig.pass_by(HURRIED_S / 2)
    rig.lives.on_result(number, ProbeResult(tuple(Answer(error="late") for _ in job.prompts)), rig.now_s)
    rig.probe()
    assert rig.life.serves


def test_a_prefill_has_half_the_time_before_service_for_the_batch() -> None:
    """The steps of the batch begin at the decode before its users come, and not beside them."""
    rig = Rig("prefill-0")
    rig.queues = UserQueues(unplaced=frozenset({"default"}))
    assert 2 * rig.probe()[1].source_s == HURRIED_S
    assert Rig(*SERVING).probe()[1].source_s == SOURCE_S


def test_the_prompt_of_a_prefill_that_users_wait_for_goes_on_in_service() -> None:
    """It runs again at once without an answer. With one, the others follow in parts."""
    rig = Rig("decode-0", name="prefill-0")
    number, job = rig.serve_late()
    assert not rig.cancelled() and len(job.prompts) == 1
    rig.lives.on_result(number, ProbeResult((Answer(error="late"),)), rig.now_s)
    ended_s = rig.now_s
    number, again = rig.probe()
    assert rig.now_s - ended_s == 1.0 and len(again.prompts) == 1
    first = tuple(Answer(each.token_ids[:1]) for each in _right(again))
    rig.lives.on_result(number, ProbeResult(first), rig.now_s)
    _, job = rig.probe()
    assert not rig.life.is_cold(rig.now_s) and again.prompts[0] not in job.prompts
    assert len(job.prompts) == len(PROMPTS) // PARTS


def test_an_engine_that_starts_anew_ends_the_prompts_that_go_on_in_service() -> None:
    """Their answers are those of another boot."""
    rig = Rig("prefill-0")
    number, job = rig.serve_late()
    rig.report(NAME, pb.REPLICA_STATE_STARTING, engine="e2")
    assert rig.cancelled() == [number] and rig.life.state.is_held
    rig.lives.on_result(number, ProbeResult(_right(job)), rig.now_s)
    rig.step()
    assert not rig.life.passed and not rig.life.is_proved


def test_a_quarantine_ends_the_prompts_that_go_on_in_service() -> None:
    """The replica found by itself, or from an earlier leader, that its engine is wrong."""
    rig = Rig("prefill-0")
    number, job = rig.serve_late()
    rig.report(NAME, pb.REPLICA_STATE_QUARANTINED)
    assert rig.cancelled() == [number]
    rig.lives.on_result(number, ProbeResult(_right(job)), rig.now_s)
    rig.step()
    assert rig.life.state.name == "QUARANTINED"


def test_a_leader_that_leads_no_more_ends_the_prompts_that_go_on_in_service() -> None:
    """Their result is ignored. The next leader runs one batch of its own."""
    rig = Rig("prefill-0")
    number, job = rig.serve_late()
    rig.lives.forget()
    assert number in rig.cancelled()
    rig.lives.on_result(number, ProbeResult(_right(job)), rig.now_s)
    rig.actions.clear()
    rig.lives.on_members((_member(NAME, "serving"), _member("prefill-0", "serving")), rig.now_s)
    for name in (NAME, "prefill-0"):
        rig.report(name, pb.REPLICA_STATE_SERVING)
    _, job = rig.probe()
    assert len(job.prompts) == job.running_max == WARM_PROMPTS_MAX and job.source is not None
    assert rig.life.is_known_engine and not job.checks_cancel


def test_wrong_tokens_of_prompts_that_go_on_in_service_take_a_decode_out() -> None:
    """It served without an answer, because users waited. The prompts run once more by itself, at once."""
    rig = Rig("prefill-0")
    number, job = rig.serve_late()
    life, began_s = rig.life, rig.now_s
    for _ in range(2):
        assert life.serves
        wrong = tuple(Answer((9, 9)) for _ in job.prompts)
        rig.lives.on_result(number, ProbeResult(wrong), rig.now_s)
        if life.serves:
            number, job = rig.probe()
            assert job.source is None
    assert life.state.name == "QUARANTINED" and rig.now_s - began_s <= 1.0


def test_prompts_without_an_answer_do_not_keep_the_others_from_their_turn() -> None:
    """Users waited for the decode. Some prompts always fail, and behind them are wrong tokens."""
    rig = Rig("prefill-0")
    rig.queues = UserQueues(unplaced=frozenset({"default"}))
    number, job = rig.probe()
    life, ran = rig.lives.get(NAME), set[int]()
    assert life is not None
    rig.lives.on_result(number, ProbeResult(tuple(Answer(error="late") for _ in job.prompts)), rig.now_s)
    for _ in range(40):
        number, job = rig.probe()
        ran.update(PROMPTS.index(each) for each in job.prompts)
        answers = tuple(Answer(error="full") for _ in job.prompts)
        rig.lives.on_result(number, ProbeResult(answers), rig.now_s)
    assert ran == set(range(len(PROMPTS))) and not life.is_proved


def test_a_decode_that_users_waited_for_is_proved_before_a_shadow_gives_up() -> None:
    """A shadow before a rollout waits for its proof for a while."""
    rig = Rig("prefill-0")
    rig.queues = UserQueues(unplaced=frozenset({"default"}))
    number, job = rig.probe()
    life = rig.lives.get(NAME)
    assert life is not None
    left = set(range(len(PROMPTS)))
    while left:
        rig.lives.on_result(number, ProbeResult(_right(job), frees_blocks=True), rig.now_s)
        before, left = left, left - {PROMPTS.index(each) for each in job.prompts}
        assert left < before, "each probe has other prompts"
        if left:
            number, job = rig.probe()
    rig.step()
    assert life.is_proved and life.age_s(rig.now_s) < PROOF_MAX_S


def test_no_prefill_computes_the_suspects_of_a_decode() -> None:
    """Users waited for it, and its suspects had no answer in time alone. The prefill may be the one that is wrong."""
    rig = Rig("prefill-0")
    rig.queues = UserQueues(unplaced=frozenset({"default"}))
    number, job = rig.probe()
    assert job.source is not None
    wrong = tuple(Answer((9, 9)) for _ in job.prompts)
    rig.lives.on_result(number, ProbeResult(wrong), rig.now_s)
    life = rig.lives.get(NAME)
    assert life is not None and life.suspects
    number, job = rig.probe()
    for _ in range(100):
        if not life.serves:
            rig.step()
    assert life.is_cold(rig.now_s) and job.source is None
    late = tuple(Answer(error="late") for _ in job.prompts)
    rig.lives.on_result(number, ProbeResult(late), rig.now_s)
    for _ in range(3):
        number, job = rig.probe()
        assert job.source is None
        rig.lives.on_result(number, ProbeResult(late), rig.now_s)


def test_a_decode_without_warmed_lengths_is_not_proved_by_no_prompt() -> None:
    """Its package has batches alone, and it computes its prompts itself."""
    rig = Rig(batches=(2, 4))
    life = rig.lives.get(NAME)
    assert life is not None
    for _ in range(40):
        number, job = rig.probe()
        assert job.prompts
        late = tuple(Answer(error="late") for _ in job.prompts)
        rig.lives.on_result(number, ProbeResult(late, frees_blocks=True), rig.now_s)
    assert life.serves and not life.is_proved


def test_a_replica_whose_engine_is_silent_is_not_probed() -> None:
    """Its golden prompts would fail. They run once the engine answers."""
    rig = Rig("prefill-0")
    rig.probe()
    life = rig.lives.get(NAME)
    assert life is not None
    rig.now_s += 10.0
    rig.lives.step(UserQueues(), lambda _: (), rig.now_s)
    assert life.serves
    for is_silent in (True, False):
        rig.actions.clear()
        life.hear_engine(rig.now_s, is_silent=is_silent)
        rig.now_s += 0.5
        rig.lives.step(UserQueues(), lambda _: (), rig.now_s)
        assert bool(life.job) is not is_silent
