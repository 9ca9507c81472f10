"""The jobs of the warm-up runner on real cores behind real Attach servers."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import replace
from functools import partial

import pytest

from controlplane.golden_runner import RUNNING_MAX
from controlplane.rollouts.golden import Prompt
from controlplane.warmup.hot_record import HotPrefix, HotQuestion, HotRecord, HotShape
from controlplane.warmup.jobs import (
    Job,
    PassJob,
    PassResult,
    ProbeJob,
    ProbeResult,
    RecordJob,
    RecordResult,
    ReferenceJob,
    ReferenceResult,
    Result,
    SeedJob,
    SeedResult,
    Shape,
)
from controlplane.warmup.runner import LATE, Hot, WarmUpRunner
from controlplane.warmup.seeder import (
    PIECE_TOKENS,
    SOURCE_PULLS_MAX,
    SOURCE_PULLS_START,
    STEPS_MAX,
    TARGET_FAILURES_MAX,
)
from kvmesh.attach.frames import pack_ids
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.triton.errors import EngineError
from tests.unit.controlplane.warmup.replicas import (
    BLOCK,
    CLOCK,
    CachingEngine,
    LiveReplica,
    fleet,
    hashes,
    runner,
    until,
)
from tests.unit.triton.fake_engine import VOCABULARY, expected

ROUTERS = (("router-0", "127.0.0.1:1"),)
JOB_S = 10.0
LATE_S_MAX = 0.5
"""Longest time from the end of a job to its result."""


def hot(*prefixes: HotPrefix, shapes: tuple[HotShape, ...] = ()) -> Hot:
    """Return routers that know `prefixes`."""

    async def ask(question: HotQuestion) -> HotRecord:
        assert question.routers == ROUTERS and question.blocks_max > 0 and question.timeout_s >= 0
        return HotRecord(prefixes, shapes)

    return ask


def prompts(count: int, blocks: int = 4) -> list[bytes]:
    """Return distinct prompts of full blocks."""
    chance = random.Random(7)
    return [pack_ids([chance.randrange(VOCABULARY) for _ in range(blocks * BLOCK)]) for _ in range(count)]


def known(given: list[bytes], *sources: LiveReplica) -> tuple[HotPrefix, ...]:
    """Put each prompt into the cache of a source, in turn; return what routers know about them."""
    found = []
    for at, prompt in enumerate(given):
        source = sources[at % len(sources)]
        source.engine.learn(prompt)
        found.append(HotPrefix(prompt, 1.0, 1, {source.target.process_id: len(prompt) // 4 // BLOCK}))
    return tuple(found)


def seed_job(target: LiveReplica, *sources: LiveReplica, end_s: float | None = None) -> SeedJob:
    """Return a seeding of `target`."""
    at_s = CLOCK.now_s() + JOB_S if end_s is None else end_s
    return SeedJob(target.target, tuple(each.target for each in sources), ROUTERS, 1000, at_s)


def pass_job(target: LiveReplica, *shapes: Shape, seed: int = 0, end_s: float | None = None) -> PassJob:
    """Return a pass on `target`."""
    at_s = CLOCK.now_s() + JOB_S if end_s is None else end_s
    return PassJob(target.target, shapes, at_s, VOCABULARY, seed)


async def seeded(job: SeedJob, routers: Hot) -> SeedResult:
    """Run a seeding."""
    result = await runner(routers).run(job)
    assert isinstance(result, SeedResult)
    return result


async def passed(job: PassJob) -> PassResult:
    """Run a pass."""
    result = await runner().run(job)
    assert isinstance(result, PassResult)
    return result


# Passes.


async def test_a_pass_on_a_prefill_runs_each_shape_and_holds_nothing() -> None:
    """Ascending, with the lowest priority, and no prompt is in the cache: not of this pass, and not of another seed."""
    async with fleet("prefill-0") as (prefill,):
        result = await passed(pass_job(prefill, Shape(64), Shape(16, 3), Shape(128, 2)))
        assert result.error == "" and result.seconds > 0 and result.cold_steps is None
        lengths = [len(each.token_ids) // 4 for each in prefill.submits]
        assert lengths == [16, 16, 16, 64, 128, 128]
        await passed(pass_job(prefill, Shape(64), Shape(16, 3), Shape(128, 2), seed=1))
        assert prefill.engine.computed_blocks == sum(lengths) // BLOCK * 2 == len(prefill.engine.cache)
        first = prefill.submits[0]
        assert first.phase == pb.PHASE_CONTEXT_ONLY and first.end_token_id == -1
        budget = first.budget
        assert (budget.purpose, budget.priority, budget.band) == (budget_pb2.PURPOSE_WARM_UP, -100, 0)
        assert (budget.attempt, budget.attempts_max) == (1, 1) and 0 < budget.remaining_ms <= JOB_S * 1000
        await until(prefill.is_empty)


async def test_a_batch_on_a_decode_runs_together() -> None:
    """All requests of a shape come in one message, and each makes a few tokens."""
    async with fleet("decode-0") as (decode,):
        decode.engine.is_stopped = True
        running = asyncio.create_task(passed(pass_job(decode, Shape(0, 8))))
        await until(lambda: len(decode.engine.live) == 8)
        decode.engine.is_stopped = False
        result = await running
        assert result.error == "" and result.seconds > 0
        assert {each.phase for each in decode.submits} == {pb.PHASE_CONTEXT_AND_GENERATION}
        assert decode.is_empty()


async def test_a_shape_larger_than_the_replica_takes_is_run_in_part() -> None:
    """A full replica refuses some requests of a batch. A prompt that never fits is left out."""
    async with fleet("decode-0") as (decode,):
        result = await passed(pass_job(decode, Shape(8, 200), Shape(5000), Shape(8)))
        assert result.error == "" and decode.engine.started_total > 10
        result = await passed(pass_job(decode, Shape(5000)))
        assert "shape of 5000 tokens x 1: REASON_INVALID" in result.error


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ((), "the job has no shape"),
        ((Shape(1 << 30, 2),), "1048576 tokens in all are allowed"),
        ((Shape(-1),), "0 or more is allowed"),
    ],
)
async def test_shapes_out_of_range_are_an_error(shapes: tuple[Shape, ...], text: str) -> None:
    """A package may hold anything."""
    async with fleet("prefill-0") as (prefill,):
        assert text in (await passed(pass_job(prefill, *shapes))).error


async def test_a_failing_engine_proves_nothing() -> None:
    """The error names the shape."""
    async with fleet("prefill-0") as (prefill,):
        prefill.engine.is_stopped = True
        running = asyncio.create_task(passed(pass_job(prefill, Shape(16))))
        await until(lambda: prefill.engine.live)
        prefill.engine.fail(next(iter(prefill.engine.live)), EngineError("out of memory"), CLOCK.now_s())
        assert (await running).error == "shape of 16 tokens x 1: CODE_ENGINE_ERROR: out of memory"


# Seeding.


async def test_hot_prefixes_are_pulled_into_the_cache() -> None:
    """The sources compute nothing, the target has all blocks, and no replica holds anything."""
    async with fleet("prefill-0", "prefill-1", "prefill-9") as (first, second, fresh):
        given = prompts(20)
        result = await seeded(seed_job(fresh, first, second), hot(*known(given, first, second)))
        assert result.error == "" and result.is_complete and result.failed_prefixes == 0
        assert (result.prefixes, result.pulled_blocks, result.replayed_blocks) == (20, 80, 0)
        assert result.confirmed_blocks == 80 and fresh.engine.cache == hashes(given)
        assert first.engine.computed_blocks == second.engine.computed_blocks == 0
        assert fresh.engine.computed_blocks == 0 and first.engine.released == second.engine.released == []
        assert {each.phase for each in fresh.submits} == {pb.PHASE_SEED}
        await until(lambda: all(each.is_empty() for each in (first, second, fresh)))


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_replay_beside_users_is_one_piece_at_a_time(role: str) -> None:
    """A user's prompt waits for one piece at most; in the end every prefix is there, counted once."""
    blocks = 2 * PIECE_TOKENS // BLOCK + 1
    async with fleet("prefill-0", f"{role}-9") as (_, fresh):
        given = prompts(2, blocks)
        fresh.engine.is_stopped = True
        job = replace(seed_job(fresh), is_replay=True, time_share=0.9, package_prefixes=tuple(given))
        running = asyncio.create_task(seeded(job, hot()))
        await until(lambda: fresh.engine.live)
        assert len(fresh.submits) == 1
        fresh.engine.is_stopped = False
        result = await running
        assert result.is_complete and (result.prefixes, result.replayed_blocks) == (2, 2 * blocks)
        lengths = [len(each.token_ids) // 4 for each in fresh.submits]
        assert lengths == 2 * [PIECE_TOKENS, 2 * PIECE_TOKENS, blocks * BLOCK]
        assert result.confirmed_blocks == 2 * blocks and fresh.engine.cache == hashes(given)
        await until(fresh.is_empty)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_replay_computes_at_the_target(role: str) -> None:
    """No source is called."""
    async with fleet("prefill-0", f"{role}-9") as (source, fresh):
        given = prompts(5)
        job = replace(seed_job(fresh, source), is_replay=True, package_prefixes=tuple(prompts(6)[5:]))
        result = await seeded(job, hot(*known(given, source)))
        assert result.is_complete and (result.prefixes, result.replayed_blocks) == (6, 24)
        assert result.pulled_blocks == 0 and result.confirmed_blocks == 24
        assert source.submits == [] and fresh.submits[0].token_ids == prompts(6)[5]
        await until(fresh.is_empty)


async def test_a_source_whose_cache_lacks_the_prefixes_is_left_out() -> None:
    """The index is wrong about it. Its users would pay for what it computes."""
    async with fleet("prefill-0", "prefill-9") as (source, fresh):
        record = known(prompts(20), source)
        source.engine.cache.clear()
        result = await seeded(seed_job(fresh, source), hot(*record))
        assert result.error == "" and not result.is_complete
        assert 3 <= len(source.submits) <= 4 and result.prefixes == len(source.submits)
        assert result.failed_prefixes == 20 - result.prefixes


async def test_a_fresh_engine_is_filled_though_routers_list_blocks_of_the_one_before() -> None:
    """A router forgets them when it hears of the new process, maybe after the plan. A later seeding trusts routers."""
    async with fleet("prefill-0", "prefill-9") as (source, fresh):
        record = tuple(
            replace(each, holders={**each.holders, "prefill-9": 4}) for each in known(prompts(5), source)
        )
        job = seed_job(fresh, source)
        assert (await seeded(job, hot(*record))).pulled_blocks == 0
        result = await seeded(replace(job, starts_empty=True), hot(*record))
        assert result.is_complete and result.pulled_blocks == result.confirmed_blocks == 20
        await until(fresh.is_empty)


async def test_one_source_runs_few_pulls_at_first_and_more_as_they_hit() -> None:
    """Further prefixes wait in the control plane."""
    async with fleet("prefill-0", "prefill-9") as (source, fresh):
        source.engine.is_stopped = True
        running = asyncio.create_task(seeded(seed_job(fresh, source), hot(*known(prompts(40), source))))
        await until(lambda: len(source.submits) == SOURCE_PULLS_START)
        source.engine.is_stopped = False
        most = 0

        def note() -> bool:
            nonlocal most
            most = max(most, len(source.core.slot_table.slots))
            return running.done()

        await until(note)
        assert (await running).is_complete and SOURCE_PULLS_START < most <= SOURCE_PULLS_MAX


async def test_a_target_that_refuses_everything_is_an_error() -> None:
    """The seeding ends after a few prefixes, and the sources hold nothing."""
    async with fleet("prefill-0", "prefill-9") as (source, fresh):
        fresh.core.drain()
        result = await seeded(seed_job(fresh, source), hot(*known(prompts(30), source)))
        assert result.error.startswith(f"prefill-9: {TARGET_FAILURES_MAX} prefixes in a row failed: REASON_")
        assert result.prefixes == 0 and len(source.submits) <= TARGET_FAILURES_MAX + STEPS_MAX
        await until(source.is_empty)


async def test_a_lost_source_is_left_out_and_a_lost_target_ends_the_seeding() -> None:
    """The other source goes on; without the target nothing does."""
    async with fleet("prefill-0", "prefill-1", "prefill-9") as (first, second, fresh):
        record = known(prompts(10), first, second)
        await first.server.stop(0)
        result = await seeded(seed_job(fresh, first, second), hot(*record))
        assert result.error == "" and not result.is_complete
        assert (result.prefixes, result.failed_prefixes) == (5, 5)
        await fresh.server.stop(0)
        result = await seeded(seed_job(fresh, second), hot(*record))
        assert result.error and result.prefixes == 0


async def test_routers_that_fail_are_an_error_without_their_values() -> None:
    """An exception may hold tokens."""

    async def fail(question: HotQuestion) -> HotRecord:
        raise ValueError("tokens 1 2 3")

    async with fleet("prefill-9") as (fresh,):
        result = await seeded(seed_job(fresh), fail)
        assert result == SeedResult(error="ValueError in the control plane")


@pytest.mark.parametrize("incomplete", [("router-0",), ()])
async def test_a_seeding_without_an_answer_of_a_router_is_not_complete(incomplete: tuple[str, ...]) -> None:
    """A router that answers that nothing is hot is something else."""

    async def ask(question: HotQuestion) -> HotRecord:
        return HotRecord(incomplete=incomplete)

    async with fleet("prefill-9") as (fresh,):
        result = await seeded(seed_job(fresh), ask)
        assert result.error == "" and result.prefixes == 0
        assert result.is_complete == (not incomplete)


# Probes.


def probe_job(
    target: LiveReplica, *peers: LiveReplica, end_s: float | None = None, running_max: int = 4
) -> ProbeJob:
    """Return a probe of `target`."""
    at_s = CLOCK.now_s() + JOB_S if end_s is None else end_s
    golden = tuple(Prompt(tuple(range(1, length + 1)), 4) for length in range(1, 11))
    return ProbeJob(target.target, golden, tuple(each.target for each in peers), at_s, running_max)


@pytest.mark.parametrize(("role", "other"), [("prefill", "decode"), ("decode", "prefill")])
async def test_a_probe_asks_cancels_and_exchanges_handoffs(role: str, other: str) -> None:
    """Answers are right, a cancel frees blocks, and each peer takes or gives one handoff. Nothing is left."""
    async with fleet(f"{role}-0", *(f"{other}-{at}" for at in range(6))) as (target, *peers):
        job = probe_job(target, *peers)
        result = await runner().run(job)
        assert isinstance(result, ProbeResult) and result.error == ""
        count = 1 if role == "prefill" else 4
        wanted = [tuple(expected(each.token_ids, 4, -1)[:count]) for each in job.prompts]
        assert [answer.token_ids for answer in result.answers] == wanted
        assert result.frees_blocks is True
        assert (result.handoffs_well, result.handoffs_failed) == (6, 0)
        assert {each.budget.purpose for each in target.submits} == {budget_pb2.PURPOSE_PROBE}
        await until(lambda: all(each.is_empty() for each in (target, *peers)))


@pytest.mark.parametrize("has_source", [False, True])
async def test_a_probe_that_runs_out_of_time_keeps_its_answers(has_source: bool) -> None:
    """The engine stands still after some prompts. The tokens of these are judged, and the others run later."""
    async with fleet("decode-0", "prefill-0") as (target, source):
        job = probe_job(target, end_s=CLOCK.now_s() + 3.0, running_max=2)
        job = replace(job, prompts=50 * job.prompts, source=source.target if has_source else None)
        task = asyncio.create_task(runner().run(job))
        await until(lambda: len(target.submits) >= 5)
        target.engine.is_stopped = True
        result = await task
        assert isinstance(result, ProbeResult) and result.frees_blocks is None
        given = [answer for answer in result.answers if not answer.error]
        assert 1 <= len(given) < len(job.prompts) == len(result.answers)
        for prompt, answer in zip(job.prompts, result.answers, strict=True):
            assert answer.error or answer.token_ids == tuple(expected(prompt.token_ids, 4, -1)[:4])


@pytest.mark.parametrize("running_max", [1, 4])
async def test_a_probe_runs_so_many_prompts_at_a_time(running_max: int) -> None:
    """An engine packs the prompts that wait together into one step."""
    async with fleet("prefill-0") as (target,):
        target.engine.is_stopped = True
        job = asyncio.create_task(runner().run(probe_job(target, running_max=running_max)))
        await until(lambda: len(target.submits) >= running_max)
        for _ in range(20):
            await asyncio.sleep(0.0)
        assert len(target.submits) == running_max
        target.engine.is_stopped = False
        result = await job
        assert isinstance(result, ProbeResult) and len(result.answers) == 10 and result.error == ""


async def test_a_probe_finds_nothing_of_itself_in_the_cache() -> None:
    """A prompt whose blocks are cached runs its last tokens alone: a shape that no pass has warmed."""
    async with fleet("prefill-0", "decode-0", "decode-1") as (target, *peers):
        job = replace(probe_job(target, *peers), prompts=(Prompt(tuple(range(100)), 4),))
        result = await runner().run(job)
        assert isinstance(result, ProbeResult) and result.handoffs_well == 2 and result.frees_blocks is True
        assert len(target.submits) == 4
        assert target.engine.computed_blocks == 4 * (100 // BLOCK)


async def test_a_lost_peer_fails_its_handoff_alone() -> None:
    """The others exchange theirs."""
    async with fleet("decode-0", "prefill-0", "prefill-1") as (target, well, lost):
        await lost.server.stop(0)
        result = await runner().run(probe_job(target, well, lost))
        assert isinstance(result, ProbeResult) and result.error == ""
        assert (result.handoffs_well, result.handoffs_failed) == (1, 1)


async def test_blocks_that_stay_reserved_after_a_cancel_are_found() -> None:
    """A core that drops cancels keeps the blocks until the deadline."""
    async with fleet("decode-0", "prefill-0") as (decode, prefill):
        for target in (decode, prefill):
            probe = replace(probe_job(target), prompts=())
            result = await runner().run(probe)
            assert isinstance(result, ProbeResult) and result.frees_blocks is True

            def drop(*_: object, engine: CachingEngine = target.engine) -> None:
                engine.is_stopped = True  # the request does not end by itself

            target.core.cancel = drop  # type: ignore[assignment]  # a bug
            result = await runner().run(probe)
            assert isinstance(result, ProbeResult) and result.frees_blocks is False


async def test_a_reference_is_the_answers_of_a_decode() -> None:
    """A lost replica is an error."""
    async with fleet("decode-0") as (decode,):
        job = probe_job(decode)
        reference = ReferenceJob(job.target, job.prompts, job.end_s)
        result = await runner().run(reference)
        assert isinstance(result, ReferenceResult) and result.error == ""
        assert [answer.token_ids for answer in result.answers] == [
            tuple(expected(each.token_ids, 4, -1)) for each in job.prompts
        ]
        await decode.server.stop(0)
        result = await runner().run(reference)
        assert isinstance(result, ReferenceResult) and "the stream was lost" in result.error
        assert len(result.answers) == len(job.prompts)


async def test_a_reference_run_that_ends_early_keeps_its_answers() -> None:
    """The engine stops after the first prompts, as one whose users come first."""
    async with fleet("decode-0") as (decode,):
        probe = probe_job(decode, end_s=CLOCK.now_s() + 2.0)
        decode.engine.is_stopped = True
        job = asyncio.create_task(runner().run(ReferenceJob(probe.target, probe.prompts, probe.end_s)))
        await until(lambda: len(decode.submits) == RUNNING_MAX)
        while len(decode.submits) == RUNNING_MAX:
            decode.engine.step(CLOCK.now_s())
            decode.shell.after_event()
            await asyncio.sleep(0.0)
        result = await job
        assert isinstance(result, ReferenceResult) and len(result.answers) == len(probe.prompts)
        good = [at for at, answer in enumerate(result.answers) if not answer.error]
        assert 0 < len(good) < len(probe.prompts)
        for at in good:
            wanted = tuple(expected(probe.prompts[at].token_ids, 4, -1))
            assert result.answers[at].token_ids == wanted


async def test_a_record_keeps_what_enough_tenants_sent() -> None:
    """Shapes are distinct powers of two, the heaviest first."""
    first, second, third = prompts(3)
    found = hot(
        HotPrefix(first, 1.0, 5, {}),
        HotPrefix(second, 1.0, 4, {}),
        HotPrefix(third, 1.0, 9, {}),
        shapes=(
            HotShape(500, 0, 1.0),
            HotShape(512, 0, 1.0),
            HotShape(0, 3, 1.5),
            HotShape(64, 0, 9.0),
            HotShape(0, 0, 1.0),
        ),
    )
    result = await runner(found).run(RecordJob("default", ROUTERS, "v1", BLOCK, 5, CLOCK.now_s() + JOB_S))
    assert result == RecordResult((Shape(64, 1), Shape(512, 1), Shape(0, 4)), (first, third))


# All jobs.


def jobs(target: LiveReplica, others: list[LiveReplica], end_s: float) -> list[Job]:
    """Return one job of each kind on a prefill `target`."""
    sources = [each for each in others if each.target.role == "prefill"]
    decodes = [each for each in others if each.target.role == "decode"]
    probe = probe_job(target, *decodes, end_s=end_s)
    return [
        pass_job(target, Shape(16, 2), Shape(64), end_s=end_s),
        seed_job(target, *sources, end_s=end_s),
        replace(seed_job(target, *sources, end_s=end_s), is_replay=True),
        probe,
        ReferenceJob(decodes[0].target, probe.prompts, end_s),
    ]


def error_of(result: Result) -> str:
    """Return the error of a result, or of its first answer."""
    answers = getattr(result, "answers", ())
    return result.error or next((answer.error for answer in answers), "")


@pytest.mark.parametrize("kind", range(5))
async def test_a_silent_engine_ends_every_job_in_time(kind: int) -> None:
    """The replicas are told, and hold nothing afterwards."""
    async with fleet("prefill-9", "prefill-0", "decode-0") as (target, *others):
        for each in (target, *others):
            each.engine.is_stopped = True
        end_s = CLOCK.now_s() + 0.3
        job = jobs(target, others, end_s)[kind]
        result = await runner(hot(*known(prompts(9), others[0]))).run(job)
        assert CLOCK.now_s() <= end_s + LATE_S_MAX
        assert not isinstance(result, SeedResult) or not result.is_complete
        assert isinstance(result, SeedResult) or error_of(result), result
        await until(lambda: all(each.is_empty() for each in (target, *others)))


async def test_a_job_that_is_late_already_does_nothing() -> None:
    """Its time may be over before it begins."""
    async with fleet("prefill-9", "prefill-0", "decode-0") as (target, *others):
        for job in jobs(target, others, CLOCK.now_s() - 1):
            result = await runner(hot(*known(prompts(9), others[0]))).run(job)
            assert any(text in error_of(result) for text in (LATE, "no answer", "did not begin")), result


async def test_random_faults_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    """Crashes of engines, stopped servers, silent engines and cancelled jobs: a result in time, and no slot is left."""
    caplog.set_level(logging.DEBUG)
    given = prompts(12)
    for seed in range(16):
        chance = random.Random(seed)
        async with fleet("prefill-9", "prefill-0", "prefill-1", "decode-0", "decode-1") as replicas:
            target, *others = replicas
            record = hot(*known(given, *others[:2]))
            end_s = CLOCK.now_s() + 1.0
            job = chance.choice(jobs(target, others, end_s))
            running = asyncio.create_task(_run(runner(record), job))
            victim = chance.choice(replicas)
            await asyncio.sleep(chance.uniform(0.0, 0.06))
            fault = chance.choice(["crash", "stop", "silence", "cancel", "none"])
            if fault == "crash":
                victim.engine.crash("engine-again", CLOCK.now_s())
            elif fault == "stop":
                await victim.server.stop(0)
            elif fault == "silence":
                victim.engine.is_stopped = True
            elif fault == "cancel":
                running.cancel()
            result = await running
            assert CLOCK.now_s() <= end_s + LATE_S_MAX, f"seed={seed}"
            assert (result is None) <= (fault == "cancel"), f"seed={seed}"
            try:
                await until(partial(_are_empty, replicas), 3.0)
            except TimeoutError:
                raise AssertionError(f"seed={seed}: {job} {fault} {replicas}") from None
    assert not [record for record in caplog.records if record.message == "a warm-up job failed"]


def _are_empty(replicas: list[LiveReplica]) -> bool:
    return all(each.is_empty() for each in replicas)


async def _run(runs: WarmUpRunner, job: Job) -> Result | None:
    """Return the result, or None for a cancelled job."""
    try:
        return await runs.run(job)
    except asyncio.CancelledError:
        return None
