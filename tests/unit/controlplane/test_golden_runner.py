"""The golden runner beside a real Attach server: answers, refusals, lost streams, deadlines, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from controlplane.golden_runner import RUNNING_MAX, GoldenRunner, golden_sets
from controlplane.rollouts.golden import Answer, GoldenSet, GoldenSetError, Prompt
from controlplane.rollouts.golden_schedule import GoldenRun, GoldenSchedule
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.server import AttachService
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.attach.v1 import attach_pb2_grpc
from kvmesh.budget.v1 import budget_pb2
from kvmesh.clock import MonotonicClock
from kvmesh.config import MeshConfig
from kvmesh.pools import VersionSettings
from kvmesh.server import SERVER_OPTIONS
from tests.patience import patience
from tests.unit.controlplane.rollouts.facts import in_state
from tests.unit.controlplane.rollouts.test_golden_schedule import member

CLOCK = MonotonicClock()
PROMPTS = tuple(Prompt(tuple(range(1, length + 1)), 4) for length in range(1, 11))
Behaviour = Callable[[DownwardOutbox, pb.Submit], None]


def tokens_of(submit: pb.Submit) -> list[int]:
    """Return the output of the replica for a prompt."""
    return [len(submit.token_ids) // 4 * 10 + at for at in range(submit.budget.max_output_tokens)]


def generate(outbox: DownwardOutbox, submit: pb.Submit) -> None:
    """Answer as decode does: a first token of its own, then frames, then the finish."""
    tokens = tokens_of(submit)
    outbox.accept(submit.slot)
    outbox.first_token(pb.FirstToken(slot=submit.slot, position=0, token_id=tokens[0]))
    outbox.tokens(submit.slot, 1, b"".join(each.to_bytes(4, "little") for each in tokens[1:]))
    outbox.finish(submit.slot, len(tokens), pb.Finish.REASON_LENGTH)


def prefill(outbox: DownwardOutbox, submit: pb.Submit) -> None:
    """Answer as prefill does: one token with a handoff, which stays held."""
    outbox.first_token(
        pb.FirstToken(slot=submit.slot, token_id=tokens_of(submit)[0], context_phase_params=b"handoff")
    )


def hang(outbox: DownwardOutbox, submit: pb.Submit) -> None:
    """Accept, and answer nothing."""
    outbox.accept(submit.slot)


def refuse(outbox: DownwardOutbox, submit: pb.Submit) -> None:
    """Refuse as a full replica does."""
    outbox.refuse(submit.slot, pb.Refusal.REASON_KV_FULL, "0 of 8 blocks are free")


def cut(outbox: DownwardOutbox, submit: pb.Submit) -> None:
    """End at the deadline, with a part of the output."""
    outbox.tokens(submit.slot, 0, b"\1\0\0\0")
    outbox.finish(submit.slot, 1, pb.Finish.REASON_DEADLINE)


def fail(outbox: DownwardOutbox, submit: pb.Submit) -> None:
    """Fail in the engine."""
    outbox.fail(submit.slot, pb.Failure.CODE_ENGINE_ERROR, "out of memory")


def skip(outbox: DownwardOutbox, submit: pb.Submit) -> None:
    """Leave a gap."""
    outbox.tokens(submit.slot, 2, b"\1\0\0\0")
    outbox.finish(submit.slot, 3, pb.Finish.REASON_LENGTH)


def overrun(outbox: DownwardOutbox, submit: pb.Submit) -> None:
    """Send more tokens than were asked for."""
    outbox.tokens(submit.slot, 0, b"\1\0\0\0" * 5)


class Replica:
    """A replica with one behaviour. It counts what is open."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.submits: list[pb.Submit] = []
        self.cancels: list[pb.Cancel] = []
        self.closed = 0
        self.most = 0
        self.changed = asyncio.Event()

    def open_session(self, peer: pb.Hello, outbox: DownwardOutbox, now_s: float) -> ReplicaSession:
        assert peer.process_id == "control-0"
        return ReplicaSession(self, outbox)

    def after_event(self) -> None:
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds."""
        async with patience(10.0):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class ReplicaSession:
    """One stream."""

    def __init__(self, replica: Replica, outbox: DownwardOutbox) -> None:
        self.replica, self.outbox = replica, outbox

    def on_request(self, message: pb.AttachRequest, now_s: float) -> None:
        self.replica.cancels.extend(message.cancels)
        self.replica.submits.extend(message.submits)
        self.replica.most = max(self.replica.most, len(message.submits))
        for submit in message.submits:
            self.replica.behaviour(self.outbox, submit)
        self.replica.changed.set()

    def on_closed(self, now_s: float) -> None:
        self.replica.closed += 1
        self.replica.changed.set()


@asynccontextmanager
async def serving(replica: Replica, boot_id: str = "b1") -> AsyncIterator[GoldenRun]:
    """Serve `replica`, and yield a run on it."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    hello = pb.Hello(process_id="decode-0", boot_id=boot_id, protocol_version=1)
    attach_pb2_grpc.add_AttachServiceServicer_to_server(AttachService(replica, hello, CLOCK), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield GoldenRun("r-1", 1, "next", "decode-0", "b1", "decode", f"127.0.0.1:{port}", "v2", 32, PROMPTS)
    finally:
        await server.stop(0)


def runner() -> GoldenRunner:
    """Return a runner without certificates."""
    return GoldenRunner(
        "control-0",
        "c1",
        CLOCK,
        lambda address, _role: grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]),
    )


async def test_a_decode_replica_runs_every_prompt_alone() -> None:
    """Greedy, as a probe, no end token, at most four at a time; the answers stand in the order of the prompts."""
    replica = Replica(generate)
    async with serving(replica) as run:
        answers = await runner().run(run)
    assert answers == tuple(Answer(tuple(tokens_of(submit))) for submit in replica.submits)
    assert [len(submit.token_ids) // 4 for submit in replica.submits] == list(range(1, 11))
    assert replica.most <= RUNNING_MAX and replica.cancels == []
    first = replica.submits[0]
    assert first.phase == pb.PHASE_CONTEXT_AND_GENERATION and first.sampling.temperature == 0
    assert first.budget.purpose == budget_pb2.PURPOSE_PROBE and first.end_token_id == -1
    assert first.model_version == "v2" and 0 < first.budget.remaining_ms <= 20_000
    assert len({submit.request_id for submit in replica.submits}) == len(PROMPTS)


async def test_the_schedule_gets_the_answers_of_its_run() -> None:
    """A run on stable becomes the reference, by which the canary's replicas are due."""
    schedule = GoldenSchedule(PROMPTS, {})
    document = in_state("PREPARING")
    async with serving(Replica(generate)) as template:
        stable = member("stable", "decode", process_id="decode-0", boot_id="b1", address=template.address)
        (run,) = schedule.due(document, [stable], CLOCK.now_s())
        await runner().run_for(schedule, run)
        canary = member("next", "decode", process_id="decode-0", boot_id="b1", address=template.address)
        (run,) = schedule.due(document, [canary], CLOCK.now_s())
        await runner().run_for(schedule, run)
    assert not run.is_reference and "has no prefill" in schedule.facts(document).reason


def test_golden_sets_are_read_from_the_files_of_versions(tmp_path: Path) -> None:
    """Versions without a file have none; an error names the key and the file."""
    file = tmp_path / "golden.jsonl"
    file.write_bytes(b'{"prompt_token_ids":[1],"output_token_ids":[2]}\n')
    engine = MeshConfig().engine
    versions = [
        VersionSettings("v1", engine, "m", tmp_path),
        VersionSettings("v2", engine, "m", tmp_path, golden=file),
    ]
    assert golden_sets(versions) == {"v2": GoldenSet((Prompt((1,), 1),), ((2,),))}
    file.write_bytes(b"{}")
    with pytest.raises(GoldenSetError, match=r'versions."v2".golden = .*golden.jsonl: line 1'):
        golden_sets(versions)
    file.unlink()
    with pytest.raises(GoldenSetError, match="No such file"):
        golden_sets(versions)


async def test_a_prefill_replica_gives_first_tokens_and_its_handoffs_are_released() -> None:
    """Each slot is cancelled as complete, and the cancels are written before the stream ends."""
    replica = Replica(prefill)
    async with serving(replica) as run:
        answers = await runner().run(replace(run, role="prefill"))
        await replica.until(lambda: len(replica.cancels) == len(PROMPTS))
    assert answers == tuple(Answer((length * 10,)) for length in range(1, 11))
    assert {cancel.reason for cancel in replica.cancels} == {pb.Cancel.REASON_COMPLETE}
    assert {submit.phase for submit in replica.submits} == {pb.PHASE_CONTEXT_ONLY}


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [
        (refuse, "REASON_KV_FULL: 0 of 8 blocks"),
        (fail, "CODE_ENGINE_ERROR: out of memory"),
        (cut, "ended by REASON_DEADLINE"),
        (skip, "a gap in the tokens"),
        (overrun, "the stream was lost: FrameError"),
    ],
)
async def test_every_failure_is_inconclusive(behaviour: Behaviour, text: str) -> None:
    """No failure gives tokens, so none is a difference."""
    async with serving(Replica(behaviour)) as run:
        answers = await runner().run(run)
    assert all(text in answer.error and not answer.token_ids for answer in answers)


async def test_a_run_ends_at_its_deadline_and_cancels_what_is_open() -> None:
    """The answers that came count; the replica is told about the others."""
    replica = Replica(
        lambda outbox, submit: (generate if len(submit.token_ids) < 12 else hang)(outbox, submit)
    )
    async with serving(replica) as run:
        answers = await runner().run(run, timeout_s=0.5)
        await replica.until(lambda: len(replica.cancels) == RUNNING_MAX)
    assert [bool(answer.error) for answer in answers] == [False] * 2 + [True] * 8
    assert answers[5].error == "no answer within 0.5 s"


async def test_a_cancelled_run_leaves_nothing_at_the_replica() -> None:
    """The stream is closed, which ends its prompts, and the cancellation is not swallowed.

    A stream that closes may drop cancels that the replica has not read.
    """
    replica = Replica(hang)
    async with serving(replica) as run:
        task = asyncio.create_task(runner().run(run))
        await replica.until(lambda: len(replica.submits) == RUNNING_MAX)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await replica.until(lambda: replica.closed == 1)
    assert len(replica.submits) == RUNNING_MAX and len(replica.cancels) <= RUNNING_MAX


async def test_a_missing_replica_is_inconclusive() -> None:
    """Nothing listens at the address."""
    async with serving(Replica(generate)) as run:
        pass
    answers = await runner().run(run, timeout_s=5.0)
    assert len(answers) == len(PROMPTS) and all("the stream was lost" in answer.error for answer in answers)


async def test_another_boot_at_the_address_is_inconclusive() -> None:
    """The replica was replaced, and its answers would be another's."""
    replica = Replica(generate)
    async with serving(replica, boot_id="b2") as run:
        answers = await runner().run(run)
    assert all("'b1' is expected" in answer.error for answer in answers)


async def test_a_stream_that_breaks_ends_the_run() -> None:
    """The answers before the break count."""

    def once(outbox: DownwardOutbox, submit: pb.Submit) -> None:
        generate(outbox, submit)
        if len(submit.token_ids) == 24:
            raise RuntimeError("bug")

    async with serving(Replica(once)) as run:
        answers = await runner().run(run)
    assert any(not answer.error for answer in answers) and "lost" in answers[-1].error
