"""Runs the jobs that warm replicas up, as an Attach caller of the role `control`.

A job ends at its `end_s` at the latest, and a little later (CLOSE_S) its calls are cancelled at the replicas. A failure is
an error in the result. Only a cancellation is raised, and it ends the job at the replicas as well.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

import grpc

from controlplane.golden_runner import RUNNING_MAX, answer
from controlplane.rollouts.golden import Answer
from controlplane.warmup import handoffs, seeding
from controlplane.warmup.hot_record import HotQuestion, HotRecord
from controlplane.warmup.jobs import (
    ERROR_CHARACTERS_MAX,
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
    Target,
)
from controlplane.warmup.passes import Pass
from controlplane.warmup.prober import Prober
from controlplane.warmup.recorded_shapes import shapes_of
from controlplane.warmup.seeder import PIECE_TOKENS, Seeder, Source
from controlplane.warmup.seeding import SeedStep
from controlplane.warmup.session import ReplicaSession, opened
from kvmesh.attach.dialing import Dialer
from kvmesh.attach.server import PROTOCOL_VERSION
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.clock import Clock

log = logging.getLogger(__name__)

Hot: TypeAlias = Callable[[HotQuestion], Awaitable[HotRecord]]
"""Asks routers for what is hot."""

RECORD_BLOCKS_MAX: Final = 100_000
"""Blocks of the prefixes for a package."""

LATE: Final = "the time was over before the job was done"


class WarmUpRunner:
    """See the module. One for each control process."""

    def __init__(
        self,
        process_id: str,
        boot_id: str,
        clock: Clock,
        open_channel: Callable[[str, str], grpc.aio.Channel],
        dialer: Dialer | None = None,
        hot: Hot | None = None,
    ) -> None:
        """`open_channel` takes an address and the role there; see session.ANSWER_BYTES_MAX. `hot`: None knows nothing."""
        self._hello = pb.Hello(process_id=process_id, boot_id=boot_id, protocol_version=PROTOCOL_VERSION)
        self._clock = clock
        self._open_channel = open_channel
        self._dialer = dialer
        self._hot = hot

    async def run(self, job: Job) -> Result:
        """Return the result of `job`, by its `end_s` and CLOSE_S."""
        if isinstance(job, PassJob):
            return await self._run_pass(job)
        if isinstance(job, SeedJob):
            return await self._run_seed(job)
        if isinstance(job, ProbeJob):
            return await self._run_probe(job)
        if isinstance(job, ReferenceJob):
            return await self._run_reference(job)
        return await self._run_record(job)

    async def _run_pass(self, job: PassJob) -> PassResult:
        session, source = self._session(job.target), self._source_of(job)
        work = Pass(job, session, self._clock, source)
        error = await self._until(job.end_s, _both(session, source), work.run)
        if error == LATE:
            error = ""  # the pass says how far it came
        return PassResult(work.seconds, work.cold_steps, _cut(error or work.error))

    async def _run_seed(self, job: SeedJob) -> SeedResult:
        record = HotRecord()
        steps: tuple[SeedStep, ...] = ()

        async def make_plan() -> None:
            nonlocal record, steps
            target = job.target
            record = await self._ask(
                HotQuestion(
                    job.routers,
                    target.model_version,
                    target.block_tokens,
                    job.blocks_max,
                    1,
                    self._left_s(job.end_s),
                )
            )
            steps = await asyncio.to_thread(_plan, job, record)

        error = await self._until(job.end_s, (), make_plan)
        if error:
            return SeedResult(error=_cut(error))
        target = self._session(job.target)
        wanted = {step.source for step in steps}
        sources = {
            each.process_id: Source(each, self._session(each))
            for each in job.sources
            if each.process_id in wanted
        }
        seeder = Seeder(target, sources, steps, job.end_s, self._clock, job.time_share)
        if steps:
            sessions = (target, *(source.session for source in sources.values()))
            error = await self._until(job.end_s, sessions, seeder.run)
        result = seeder.result(_cut(seeder.error or ("" if error == LATE else error)))
        # Without an answer of any router, it is not known what is left.
        is_unknown = bool(job.routers) and len(record.incomplete) == len(job.routers) and not record.prefixes
        return replace(result, is_complete=result.is_complete and not is_unknown)

    async def _run_probe(self, job: ProbeJob) -> ProbeResult:
        session, source = self._session(job.target), self._source_of(job)
        prober = Prober(session, job.prompts, job.end_s, self._clock, source)
        found: dict[int, Answer] = {}
        frees_blocks: bool | None = None

        async def probe() -> None:
            nonlocal frees_blocks
            if source is None:
                await answer(found, session, job.prompts, job.end_s, job.running_max)
            else:
                await handoffs.answer(
                    found,
                    (source, session),
                    job.prompts,
                    job.end_s,
                    job.running_max,
                    self._clock,
                    job.source_s,
                )
            if not session.lost:
                if job.checks_cancel:
                    frees_blocks = await prober.frees_blocks()
                await prober.exchange(job.peers, self._session)

        error = await self._until(job.end_s, _both(session, source), probe)
        absent = Answer(error=session.lost or error or "no answer")
        return ProbeResult(
            tuple(found.get(at, absent) for at in range(len(job.prompts))),
            frees_blocks,
            prober.handoffs_well,
            prober.handoffs_failed,
            _cut(session.lost or error),
        )

    async def _run_reference(self, job: ReferenceJob) -> ReferenceResult:
        session = self._session(job.target)
        found: dict[int, Answer] = {}

        async def ask() -> None:
            await answer(found, session, job.prompts, job.end_s, RUNNING_MAX)

        error = await self._until(job.end_s, (session,), ask)
        absent = Answer(error=session.lost or error or "no answer")
        given = tuple(found.get(at, absent) for at in range(len(job.prompts)))
        return ReferenceResult(given, _cut(session.lost or error))

    async def _run_record(self, job: RecordJob) -> RecordResult:
        result = RecordResult()

        async def ask() -> None:
            nonlocal result
            record = await self._ask(
                HotQuestion(
                    job.routers,
                    job.model_version,
                    job.block_tokens,
                    RECORD_BLOCKS_MAX,
                    job.tenants_min,
                    self._left_s(job.end_s),
                )
            )
            kept = (each for each in record.prefixes if each.tenant_count >= job.tenants_min)
            result = RecordResult(shapes_of(record.shapes), tuple(each.token_ids for each in kept))

        error = await self._until(job.end_s, (), ask)
        return RecordResult(error=_cut(error)) if error else result

    async def _until(
        self, end_s: float, sessions: Sequence[ReplicaSession], work: Callable[[], Awaitable[None]]
    ) -> str:
        """Run `work` with open `sessions` until `end_s`. Return why it did not end by itself. Empty: it did."""
        bound = asyncio.timeout(self._left_s(end_s))
        try:
            async with opened(sessions), bound:
                await work()
        except Exception as error:  # noqa: BLE001 - a job that fails must not end the control plane
            if isinstance(error, TimeoutError) and bound.expired():
                return LATE
            return _fault(error)
        return ""

    async def _ask(self, question: HotQuestion) -> HotRecord:
        if self._hot is None or not question.routers:
            return HotRecord()
        return await self._hot(question)

    def _session(self, target: Target) -> ReplicaSession:
        return ReplicaSession(target, self._hello, self._clock, self._open_channel, self._dialer)

    def _source_of(self, job: PassJob | ProbeJob) -> ReplicaSession | None:
        return self._session(job.source) if job.source is not None else None

    def _left_s(self, end_s: float) -> float:
        return max(0.0, end_s - self._clock.now_s())


def _both(session: ReplicaSession, source: ReplicaSession | None) -> tuple[ReplicaSession, ...]:
    return (session,) if source is None else (session, source)


def _plan(job: SeedJob, record: HotRecord) -> tuple[SeedStep, ...]:
    """Return the steps of `job`. A source must have a KV address, and the target's version and size of blocks."""
    target = job.target
    sources = [
        each.process_id
        for each in job.sources
        if each.kv_address
        and each.process_id != target.process_id
        and (each.model_version, each.block_tokens) == (target.model_version, target.block_tokens)
    ]
    steps = seeding.plan(
        record.prefixes,
        job.package_prefixes,
        target,
        sources,
        job.blocks_max,
        is_replay=job.is_replay,
        is_empty=job.starts_empty,
    )
    if job.time_share == 1.0:
        return steps
    return tuple(seeding.in_pieces(steps, target.block_tokens, PIECE_TOKENS))


def _fault(error: Exception) -> str:
    """Log where `error` came from, and return its text. The log has no values, because they may be a user's tokens."""
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = ", ".join(f"{frame.filename}:{frame.lineno}" for frame in where)
    log.error("a warm-up job failed", extra={"error": type(error).__name__, "place": place})
    return f"{type(error).__name__} in the control plane"


def _cut(error: str) -> str:
    return error[:ERROR_CHARACTERS_MAX]
