"""A class's runtime is kept to both sides, and what cannot be met never reaches an engine."""

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

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(120)]

RUNTIME_S = 2.0
"""For the 30 s of a class of ordinary calls; `cuts` run by itself takes the true ones."""
REQUESTS = 32
LATE_S = RUNTIME_S / 2
"""A stream that is not cut goes on for three runtimes more. How late a cut is: docs/measurements/budgets.md."""
BACK_S = 1.0
ENGINES = ("prefill-0-engine", "decode-0-engine")


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    """One prefill and one decode replica, warm: every stream is open and a prefill was measured."""
    async with running_mesh(config_of(RUNTIME_S, REQUESTS), tmp_path) as started:
        for token in (5, 6):
            end = await run(started, [token] * 2500, 3, 10.0, WRITER_KEY)
            assert end.error is None, end.error
        await started.idle(5)
        yield started


async def test_runtimes_hold_and_what_cannot_be_met_never_starts(mesh: Mesh) -> None:
    """One mesh, three questions: a mesh takes longer to start than to ask."""
    await ends_at_the_runtime_of_its_class(mesh)
    await runs_as_long_as_another_class_allows(mesh)
    await never_starts_what_has_no_time_left(mesh)
    await replicas_refuse_by_themselves(mesh)


async def ends_at_the_runtime_of_its_class(mesh: Mesh) -> None:
    """None is cut before, 95 of 100 within half a runtime after, all have tokens, and their blocks are free in a second.

    What this machine takes for a health check meanwhile is not the mesh's.
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
    """The same mesh, a caller of the long class: it ends when it has its tokens."""
    end = await run(mesh, [7] * 40, round(1.1 * RUNTIME_S / STEP_S), None, WRITER_KEY)
    assert end.finish == pb.FINISH_REASON_LENGTH and end.after_s > RUNTIME_S, end


async def never_starts_what_has_no_time_left(mesh: Mesh) -> None:
    """50 ms left: refused at the door. More than that, less than its prefill takes: refused before any engine has it."""
    before = [await engine_counters(mesh, engine) for engine in ENGINES]
    prompts = [[number] * 9000 for number in range(10, 30)]  # 1.8 s of prefill each
    short = await asyncio.gather(*(run(mesh, prompt[:40], 10, 0.05) for prompt in prompts))
    late = await asyncio.gather(*(run(mesh, prompt, 10, 1.0) for prompt in prompts))
    slow = await asyncio.gather(*(run(mesh, prompt, 10, 10.0, WRITER_KEY, ttft_s=1.0) for prompt in prompts))
    for ends in (short, late, slow):
        reasons = {reason(end) for end in ends}
        # On a busy machine a timer may be faster than the refusal: this client's own (no reason) or the frontend's.
        timer = "TTFT_TIMEOUT" if ends is slow else "DEADLINE"
        assert "INFEASIBLE_DEADLINE" in reasons <= {"INFEASIBLE_DEADLINE", timer, ""}, reasons
        assert {end.error.code() for end in ends if end.error} == {grpc.StatusCode.DEADLINE_EXCEEDED}
    await mesh.idle(2)
    assert [await engine_counters(mesh, engine) for engine in ENGINES] == before


async def replicas_refuse_by_themselves(mesh: Mesh) -> None:
    """Whatever a router lets through: no engine call, and the estimate in the refusal."""
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
    """Return the mesh's own word for how a call failed."""
    assert end.error is not None, end
    return errors.from_rpc_error(end.error).reason
