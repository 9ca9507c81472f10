"""Work of a decode with the prompts of a prefill: equal tokens, no prompt computed at the decode, nothing left."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from controlplane.rollouts.golden import Answer, Prompt
from controlplane.warmup.jobs import PassJob, PassResult, ProbeJob, ProbeResult, Shape
from kvmesh.attach.v1 import attach_pb2 as pb
from tests.patience import patience
from tests.unit.controlplane.warmup.replicas import CLOCK, LiveReplica, fleet, runner, until
from tests.unit.triton.fake_engine import VOCABULARY, expected

PROMPTS = tuple(Prompt(tuple(range(1, length + 1)), 4) for length in range(1, 40, 3))
WANTED = tuple(Answer(tuple(expected(each.token_ids, 4, -1))) for each in PROMPTS)


def _probe(decode: LiveReplica, prefill: LiveReplica | None) -> ProbeJob:
    source = None if prefill is None else prefill.target
    return ProbeJob(decode.target, PROMPTS, (), CLOCK.now_s() + 10.0, 8, source)


def _pass(decode: LiveReplica, prefill: LiveReplica, *shapes: Shape) -> PassJob:
    return PassJob(decode.target, shapes, CLOCK.now_s() + 10.0, VOCABULARY, 0, prefill.target)


def _phases(replica: LiveReplica) -> set[int]:
    return {each.phase for each in replica.submits}


async def test_golden_tokens_are_those_of_a_decode_alone() -> None:
    """The first token comes from the prefill. The decode computes no prompt."""
    async with fleet("decode-0", "decode-1", "prefill-0") as (decode, alone, prefill):
        results = [await runner().run(_probe(decode, prefill)), await runner().run(_probe(alone, None))]
        for result in results:
            assert isinstance(result, ProbeResult) and result.error == ""
            assert result.answers == WANTED and result.frees_blocks is True
        assert _phases(decode) == {pb.PHASE_GENERATION_ONLY} and decode.engine.computed_blocks == 0
        assert _phases(alone) == {pb.PHASE_CONTEXT_AND_GENERATION} and alone.engine.computed_blocks > 0
        await until(lambda: all(each.is_empty() for each in (decode, alone, prefill)))


async def test_a_batch_meets_its_decode_at_once() -> None:
    """The prefill has computed all prompts before the first one runs at the decode. Local prompts run there alone."""
    async with fleet("decode-0", "prefill-0") as (decode, prefill):
        decode.engine.is_stopped = True
        running = asyncio.create_task(runner().run(_pass(decode, prefill, Shape(8, 8))))
        await until(lambda: len(decode.engine.live) == 8)
        assert _phases(decode) == {pb.PHASE_GENERATION_ONLY} and len(prefill.submits) == 8
        decode.engine.is_stopped = False
        result = await running
        assert isinstance(result, PassResult) and result.error == "" and result.seconds > 0
        assert decode.engine.computed_blocks == 0
        local = await runner().run(_pass(decode, prefill, Shape(0), Shape(32)))
        assert isinstance(local, PassResult) and local.error == "" and len(prefill.submits) == 9
        assert _phases(decode) == {pb.PHASE_GENERATION_ONLY, pb.PHASE_CONTEXT_AND_GENERATION}
        await until(lambda: decode.is_empty() and prefill.is_empty())


async def test_without_its_prefill_a_pass_runs_at_the_decode_and_a_probe_proves_nothing() -> None:
    """A pass warms what it can. A probe that did not run is repeated alone by its life."""
    async with fleet("decode-0", "prefill-0") as (decode, prefill):
        await prefill.server.stop(0)
        passed = await runner().run(_pass(decode, prefill, Shape(8, 4)))
        assert isinstance(passed, PassResult) and passed.error == ""
        assert _phases(decode) == {pb.PHASE_CONTEXT_AND_GENERATION}
        probed = await runner().run(_probe(decode, prefill))
        assert isinstance(probed, ProbeResult)
        assert all("at the prefill" in each.error and not each.token_ids for each in probed.answers)
        await until(decode.is_empty)


async def test_a_batch_that_the_prefill_refuses_in_part_runs_at_the_decode() -> None:
    """A part of a batch is another shape: it must not count as the whole."""
    async with fleet("decode-0", "decode-1", "decode-2", "prefill-0") as (*decodes, prefill):
        jobs = [_pass(each, prefill, Shape(8, 64)) for each in decodes]
        results = await asyncio.gather(*(runner().run(job) for job in jobs))
        for decode, result in zip(decodes, results, strict=True):
            assert isinstance(result, PassResult) and result.error == ""
            phases = [each.phase for each in decode.submits]
            assert {phases.count(phase) for phase in set(phases)} == {64}
        await until(lambda: all(each.is_empty() for each in (*decodes, prefill)))


async def test_a_batch_is_not_larger_than_the_source_allows() -> None:
    """A batch holds blocks of the prefill until its last prompt is computed."""
    async with fleet("decode-0", "prefill-0") as (decode, prefill):
        job = replace(_pass(decode, prefill, Shape(8, 4), Shape(8, 16)), source_rows_max=4)
        result = await runner().run(job)
        assert isinstance(result, PassResult) and result.error == ""
        assert len(prefill.submits) == 4
        assert [each.phase for each in decode.submits].count(pb.PHASE_CONTEXT_AND_GENERATION) == 16


async def test_a_prefill_that_hangs_costs_a_part_of_the_time() -> None:
    """The pass goes on at the decode. The probe has answers with an error, and its life runs it alone."""
    async with fleet("decode-0", "prefill-0") as (decode, prefill):
        prefill.engine.is_stopped = True
        job = replace(_pass(decode, prefill, Shape(8, 2), Shape(8, 4)), end_s=CLOCK.now_s() + 4.0)
        result = await runner().run(job)
        assert isinstance(result, PassResult) and result.error == "" and len(prefill.submits) == 2
        assert _phases(decode) == {pb.PHASE_CONTEXT_AND_GENERATION}
        probed = await runner().run(replace(_probe(decode, prefill), end_s=CLOCK.now_s() + 1.0))
        assert isinstance(probed, ProbeResult) and len(probed.answers) == len(PROMPTS)
        assert all(each.error for each in probed.answers)
        prefill.engine.is_stopped = False
        await until(lambda: decode.is_empty() and prefill.is_empty())


async def test_a_probe_bounds_the_time_of_its_prefill() -> None:
    """Users wait for the decode: a slow prefill has a part of their time, and not of the whole probe."""
    async with fleet("decode-0", "prefill-0") as (decode, prefill):
        prefill.engine.is_stopped = True
        job = replace(_probe(decode, prefill), end_s=CLOCK.now_s() + 600.0, running_max=1, source_s=0.1)
        async with patience(30.0):  # a batch of the default bound takes 3 s
            probed = await runner().run(replace(job, checks_cancel=False))
        assert isinstance(probed, ProbeResult) and len(probed.answers) == len(PROMPTS)
        assert all(each.error for each in probed.answers) and prefill.submits


@pytest.mark.parametrize("stopped", ["prefill", "decode"])
async def test_a_cancellation_leaves_nothing(stopped: str) -> None:
    """Neither calls of the decode nor handoffs of the prefill."""
    async with fleet("decode-0", "prefill-0") as (decode, prefill):
        target = decode if stopped == "decode" else prefill
        target.engine.is_stopped = True
        running = asyncio.create_task(runner().run(_probe(decode, prefill)))
        await until(lambda: len(target.submits) >= 8)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        target.engine.is_stopped = False
        await until(lambda: decode.is_empty() and prefill.is_empty())
