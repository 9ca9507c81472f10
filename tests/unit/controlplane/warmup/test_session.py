"""A session beside a real Attach server: results, hostile replicas, lost streams, load reports, cancellation."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest

from controlplane.rollouts.golden_schedule import GoldenRun
from controlplane.warmup.jobs import ERROR_CHARACTERS_MAX, PassJob, PassResult, Shape, Target
from controlplane.warmup.session import CLOSE_S, Call, CallResult, ReplicaSession
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.rules import HANDOFF_BYTES_MAX
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from tests.patience import quiet_s
from tests.unit.controlplane.test_golden_runner import (
    Behaviour,
    Replica,
    cut,
    fail,
    generate,
    hang,
    overrun,
    prefill,
    refuse,
    serving,
    skip,
)
from tests.unit.controlplane.warmup.replicas import CLOCK, channel, packed, runner

HELLO = pb.Hello(process_id="control-0", boot_id="c1", protocol_version=1)
CALL_S = 5.0


@asynccontextmanager
async def session_on(replica: Replica) -> AsyncIterator[ReplicaSession]:
    """Serve `replica`, and open a session on it."""
    async with serving(replica) as run, ReplicaSession(run, HELLO, CLOCK, channel) as session:
        yield session


def call(
    phase: pb.Phase.ValueType = pb.PHASE_CONTEXT_AND_GENERATION,
    *,
    seconds: float = CALL_S,
    keeps_handoff: bool = False,
    is_private: bool = False,
) -> Call:
    """Return a call with four output tokens."""
    return Call(
        phase=phase,
        token_ids=packed(1, 2, 3),
        output_tokens=4,
        deadline_s=CLOCK.now_s() + seconds,
        purpose=budget_pb2.PURPOSE_WARM_UP,
        keeps_handoff=keeps_handoff,
        is_private=is_private,
    )


async def result_of(behaviour: Behaviour, wanted: Call) -> CallResult:
    """Return the result of one call at a replica with `behaviour`."""
    async with session_on(Replica(behaviour)) as session:
        return await session.run(wanted)


async def test_a_call_gives_its_tokens() -> None:
    """All tokens in the order of their positions."""
    result = await result_of(generate, call())
    assert result.token_ids == (30, 31, 32, 33) and result.error == "" and result.seconds > 0


async def test_a_handoff_is_held_until_its_end_or_released_at_once() -> None:
    """The caller chooses the reason. Leaving the session ends what is held.

    A stream that closes may drop a cancel that the replica has not read. The end of the stream releases the handoff then.
    """
    replica = Replica(prefill)
    async with session_on(replica) as session:
        held = await session.run(call(pb.PHASE_CONTEXT_ONLY, keeps_handoff=True))
        assert held.context_phase_params == b"handoff" and held.token_ids == (30,)
        await session.run(call(pb.PHASE_CONTEXT_ONLY))
        await replica.until(lambda: len(replica.cancels) == 1)
        session.end(held.slot, pb.Cancel.REASON_TRANSFERRED)
        session.end(held.slot, pb.Cancel.REASON_TRANSFERRED)
        left = await session.run(call(pb.PHASE_CONTEXT_ONLY, keeps_handoff=True))
    await replica.until(lambda: replica.closed == 1)
    heard = [(each.slot, each.reason) for each in replica.cancels]
    assert heard[:2] == [(2, pb.Cancel.REASON_COMPLETE), (held.slot, pb.Cancel.REASON_TRANSFERRED)]
    assert heard[2:] in ([], [(left.slot, pb.Cancel.REASON_ABANDONED)])


def position_beyond_32_bits(outbox: DownwardOutbox, submit: pb.Submit) -> None:
    """Send the first token at the largest position."""
    outbox.first_token(pb.FirstToken(slot=submit.slot, position=(1 << 32) - 1))


def huge_handoff(outbox: DownwardOutbox, submit: pb.Submit) -> None:
    """Send a handoff that is too large."""
    outbox.first_token(pb.FirstToken(slot=submit.slot, context_phase_params=bytes(HANDOFF_BYTES_MAX + 1)))


def uneven_frame(outbox: DownwardOutbox, submit: pb.Submit) -> None:
    """Send a row with a part of a token."""
    outbox.tokens(submit.slot, 0, b"\1\0\0\0\2\0")


def huge_message(outbox: DownwardOutbox, submit: pb.Submit) -> None:
    """Send a message beyond gRPC's limit of the channel."""
    outbox.tokens(submit.slot, 0, bytes(5 << 20))


def long_text(outbox: DownwardOutbox, submit: pb.Submit) -> None:
    """Refuse in very many words."""
    outbox.refuse(submit.slot, pb.Refusal.REASON_KV_FULL, "full " * 1000)


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [
        (refuse, "REASON_KV_FULL: 0 of 8 blocks"),
        (fail, "CODE_ENGINE_ERROR: out of memory"),
        (cut, "ended by REASON_DEADLINE"),
        (skip, "a gap in the tokens"),
        (overrun, "the stream was lost: FrameError"),
        (position_beyond_32_bits, "the stream was lost: FrameError"),
        (huge_handoff, "the stream was lost: FrameError"),
        (uneven_frame, "the stream was lost: FrameError"),
        (huge_message, "the stream was lost: RESOURCE_EXHAUSTED"),
        (long_text, "REASON_KV_FULL: full full"),
    ],
)
async def test_every_failure_is_a_short_error(behaviour: Behaviour, text: str) -> None:
    """An error has no tokens beside it. The text of a replica is left out where the prompt is a user's."""
    result = await result_of(behaviour, call())
    assert text in result.error and result.token_ids == ()
    assert len(result.error) <= ERROR_CHARACTERS_MAX
    private = await result_of(behaviour, call(is_private=True))
    assert private.error and private.error == private.error.split(":")[0]


async def test_a_replica_that_does_not_answer_ends_at_the_deadline() -> None:
    """The replica is told. The session takes further calls."""
    replica = Replica(lambda outbox, submit: (hang if submit.slot == 1 else generate)(outbox, submit))
    async with session_on(replica) as session:
        result = await session.run(call(seconds=0.05))
        assert result.is_late and result.error.startswith("no answer within 0.0")
        assert (await session.run(call())).error == ""
    assert [each.reason for each in replica.cancels] == [pb.Cancel.REASON_DEADLINE]


async def test_a_cancelled_caller_cancels_its_calls_alone() -> None:
    """A call beside it goes on."""
    replica = Replica(hang)
    async with session_on(replica) as session:
        running = [asyncio.create_task(session.run(call())) for _ in range(2)]
        await replica.until(lambda: len(replica.submits) == 2)
        running[0].cancel()
        await replica.until(lambda: len(replica.cancels) == 1)
        assert replica.cancels[0].slot == 1 and not running[1].done()
    assert (await running[1]).error == "the session is closed"


async def test_a_lost_stream_ends_all_calls_and_is_not_opened_again() -> None:
    """A call that comes later has the same error."""
    replica = Replica(hang)
    async with serving(replica) as run, ReplicaSession(run, HELLO, CLOCK, channel) as session:
        running = [asyncio.create_task(session.run(call())) for _ in range(3)]
        await replica.until(lambda: len(replica.submits) == 3)
        replica.behaviour = overrun
        await session.run(call())
        results = [*(await asyncio.gather(*running)), await session.run(call())]
        assert {each.error for each in results} == {session.lost} and session.lost
        assert len(replica.submits) == 4
        assert await session.wait_load(lambda _: True, CALL_S) is None


async def test_another_process_at_the_address_is_an_error() -> None:
    """Addresses are reused."""
    async with (
        serving(Replica(generate), boot_id="b2") as run,
        ReplicaSession(run, HELLO, CLOCK, channel) as session,
    ):
        assert "'b1' is expected" in (await session.run(call())).error


async def test_load_reports_are_awaited_by_condition_and_time() -> None:
    """A report that came before is taken, unless a later one is asked for."""

    def report(outbox: DownwardOutbox, submit: pb.Submit) -> None:
        generate(outbox, submit)
        outbox.load(pb.LoadReport(cached_block_count=submit.slot))

    async with session_on(Replica(report)) as session:
        assert session.load is None
        await session.run(call())
        first = await session.wait_load(lambda load: load.cached_block_count == 1, CALL_S)
        assert first is not None and session.load == first
        at_s = session.load_s
        assert await session.wait_load(lambda _: True, 0.02, after_s=at_s) is None
        waiting = asyncio.create_task(session.wait_load(lambda _: True, CALL_S, after_s=at_s))
        await session.run(call())
        second = await waiting
        assert second is not None and second.cached_block_count == 2


@pytest.mark.parametrize("later_s", [(0.005, 0.1), (1.0, 1.0)])
@pytest.mark.parametrize("cold", [(None, None), (5, 5), (5, 9), (None, 9)])
async def test_a_pass_counts_cold_steps_by_reports_after_its_end(
    cold: tuple[int | None, int | None], later_s: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report with the steps may follow one without them, or be the first one after the answers."""
    # A busy machine may be late, with the second report too.
    monkeypatch.setattr("controlplane.warmup.passes.REPORT_S", CALL_S)
    monkeypatch.setattr("controlplane.warmup.passes.SETTLE_S", 0.8)
    later: set[asyncio.TimerHandle] = set()

    def report(outbox: DownwardOutbox, submit: pb.Submit) -> None:
        generate(outbox, submit)
        loop = asyncio.get_running_loop()
        if later_s[0] < later_s[1]:
            later.add(loop.call_later(later_s[0], outbox.load, pb.LoadReport(cold_step_total=cold[0])))
        later.add(loop.call_later(later_s[1], outbox.load, pb.LoadReport(cold_step_total=cold[1])))

    class Reporting(Replica):
        def open_session(self, peer: pb.Hello, outbox: DownwardOutbox, now_s: float):  # type: ignore[no-untyped-def]  # as there
            outbox.load(pb.LoadReport(cold_step_total=cold[0]))
            return super().open_session(peer, outbox, now_s)

    async with serving(Reporting(report)) as run:
        result = await runner().run(
            PassJob(target_of(run), (Shape(4),), CLOCK.now_s() + CALL_S, vocabulary_size=8)
        )
    assert isinstance(result, PassResult) and result.error == ""
    assert result.cold_steps == (None if cold[0] is None or cold[1] is None else cold[1] - cold[0])


def target_of(run: GoldenRun) -> Target:
    """Return the target at the address of `run`."""
    return Target(
        run.process_id,
        run.boot_id,
        "",
        run.role,
        run.pool,
        run.model_version,
        run.block_tokens,
        run.address,
    )


async def test_random_answers_of_a_replica_give_one_result_each() -> None:
    """Rows of any kind, for any slot, in any order: every call ends, with at most its tokens."""
    for seed in range(30):
        chance = random.Random(seed)
        replica = Replica(partial(_disturb, chance))
        async with session_on(replica) as session:
            began_s = quiet_s()
            calls = [
                call(
                    chance.choice([pb.PHASE_CONTEXT_ONLY, pb.PHASE_CONTEXT_AND_GENERATION]),
                    seconds=0.1,
                    keeps_handoff=chance.random() < 0.5,
                )
                for _ in range(6)
            ]
            results = await session.run_together(calls)
            assert quiet_s() - began_s < 1.0, f"seed={seed}"
            for result in results:
                assert len(result.token_ids) <= 4 and (not result.error or not result.token_ids), (
                    f"seed={seed}"
                )
        assert quiet_s() - began_s < 1.0 + CLOSE_S, f"seed={seed}"


def _disturb(chance: random.Random, outbox: DownwardOutbox, submit: pb.Submit) -> None:
    """Send random rows."""
    slot = submit.slot
    rows: list[Callable[[int], object]] = [
        outbox.accept,
        lambda at: outbox.first_token(pb.FirstToken(slot=at, context_phase_params=b"h")),
        lambda at: outbox.tokens(at, chance.randrange(3), b"\1\0\0\0"),
        lambda at: outbox.transfer(at, 1),
        lambda at: outbox.finish(at, 1, chance.choice(pb.Finish.Reason.values())),
        lambda at: outbox.fail(at, chance.choice(pb.Failure.Code.values()), "x"),
        lambda at: outbox.refuse(at, chance.choice(pb.Refusal.Reason.values()), "x"),
        lambda at: outbox.load(pb.LoadReport(cached_block_count=at)),
    ]
    for _ in range(chance.randint(0, 4)):
        chance.choice(rows)(chance.choice([slot, slot, slot - 1, slot + 1, 1 << 31]))
