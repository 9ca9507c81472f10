"""The runtime of a class holds in both directions, and a request that cannot meet its deadline never reaches an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from kvmesh import errors
from kvmesh.attach.v1 import attach_pb2
from kvmesh.inference.v1 import inference_pb2 as pb
from tests.integration.budgets.cuts import (
    STEP_S,
    WRITER_KEY,
    End,
    config_of,
    cut,
    engine_counters,
    refusal_of,
    run,
)
from tests.integration.harness import Mesh, running_mesh
from tests.unit.triton.reader import submit

pytestmark = pytest.mark.mesh

RUNTIME_S = 2.0
"""Stands for the 30 s of a class of ordinary calls; `cuts` as a program uses the true 30 s."""
REQUESTS = 32
LATE_S = RUNTIME_S / 2
"""A stream that is not cut runs for three more runtimes. Delays of cuts: docs/measurements/budgets.md."""
BACK_S = 1.0
ENGINES = ("prefill-0-engine", "decode-0-engine")


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    """One prefill and one decode replica, warm: all streams are open and a prefill has been measured."""
    async with running_mesh(config_of(RUNTIME_S, REQUESTS), tmp_path) as started:
        for token in (5, 6):
            end = await run(started, [token] * 2500, 3, 10.0, WRITER_KEY)
            assert end.error is None, end.error
        await started.idle(5)
        yield started


async def test_runtimes_hold_and_what_cannot_be_met_never_starts(mesh: Mesh) -> None:
    """One mesh for three checks, because its start takes longer than the checks."""
    await ends_at_the_runtime_of_its_class(mesh)
    await runs_as_long_as_another_class_allows(mesh)
    await never_starts_what_has_no_time_left(mesh)
    await replicas_refuse_by_themselves(mesh)


async def ends_at_the_runtime_of_its_class(mesh: Mesh) -> None:
    """No stream is cut early, 95 of 100 within half a runtime afterwards, all have tokens, and their blocks are free
    within a second.

    The limits are extended by the slowest health check around the cut, which is a delay of this machine.
    """
    cuts = await cut(mesh, RUNTIME_S, REQUESTS, seed=5)
    print(cuts.row())
    for end in cuts.ends:
        assert end.error is None, end.error
        assert end.finish == pb.FINISH_REASON_DEADLINE, end
        assert end.after_s >= RUNTIME_S, f"cut after {end.after_s:.3f} s"
        assert end.tokens and end.last_token_s > RUNTIME_S / 2, end
    assert cuts.late_s(0.95) <= LATE_S + cuts.answer_s, cuts.row()
    assert cuts.back_s <= BACK_S + cuts.answer_s, cuts.row()


async def runs_as_long_as_another_class_allows(mesh: Mesh) -> None:
    """The same mesh, a caller of the long class: the request ends with its last token."""
    end = await run(mesh, [7] * 40, round(1.1 * RUNTIME_S / STEP_S), None, WRITER_KEY)
    assert end.finish == pb.FINISH_REASON_LENGTH and end.after_s > RUNTIME_S, end


async def never_starts_what_has_no_time_left(mesh: Mesh) -> None:
    """With 50 ms left: rejected at admission. With more, but less than the prefill takes: rejected before any engine
    call.
    """
    before = [await engine_counters(mesh, engine) for engine in ENGINES]
    prompts = [[number] * 9000 for number in range(10, 30)]  # 1.8 s of prefill each
    short = await asyncio.gather(*(run(mesh, prompt[:40], 10, 0.05) for prompt in prompts))
    late = await asyncio.gather(*(run(mesh, prompt, 10, 1.0) for prompt in prompts))
    slow = await asyncio.gather(*(run(mesh, prompt, 10, 10.0, WRITER_KEY, ttft_s=1.0) for prompt in prompts))
    for ends in (short, late, slow):
        reasons = {reason(end) for end in ends}
        # On a busy machine a timer may be faster than the refusal: the client's own (no reason) or the frontend's.
        timer = "TTFT_TIMEOUT" if ends is slow else "DEADLINE"
        assert "INFEASIBLE_DEADLINE" in reasons <= {"INFEASIBLE_DEADLINE", timer, ""}, reasons
        assert {end.error.code() for end in ends if end.error} == {grpc.StatusCode.DEADLINE_EXCEEDED}
    await mesh.idle(2)
    assert [await engine_counters(mesh, engine) for engine in ENGINES] == before


async def replicas_refuse_by_themselves(mesh: Mesh) -> None:
    """A replica rejects by itself, if a router sends such a request: no engine call, and the estimate in the refusal."""
    before = [await engine_counters(mesh, engine) for engine in ENGINES]
    for part, phase in (
        ("prefill-0", attach_pb2.PHASE_CONTEXT_ONLY),
        ("decode-0", attach_pb2.PHASE_GENERATION_ONLY),
        ("decode-0", attach_pb2.PHASE_CONTEXT_AND_GENERATION),
    ):
        settings = mesh.config.engine
        row = submit(
            1,
            list(range(50)),
            phase,
            remaining_ms=50,
            estimate_s=0.06,
            block_tokens=settings.block_tokens,
            model_version=settings.salt,
        )
        refusal = await refusal_of(mesh, part, row)
        assert refusal.reason == attach_pb2.Refusal.REASON_DEADLINE, refusal
        assert refusal.estimate_ms >= 60, refusal
    await mesh.idle(2)
    assert [await engine_counters(mesh, engine) for engine in ENGINES] == before


def reason(end: End) -> str:
    """Return the mesh's own reason for the failure of a call."""
    assert end.error is not None, end
    return errors.from_rpc_error(end.error).reason
