"""The engine port on a real tritonserver that is stopped, or loses its model: errors, their times, and the state left."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from kvmesh.triton.errors import EngineLost
from kvmesh.triton.liveness import MODEL_TIMEOUT_S, SERVER_TIMEOUT_S
from kvmesh.triton.port import CallKind
from tests.family import family
from tests.integration.harness import START_S_MAX, engine_part, engine_ready, until
from tests.integration.replicas.test_engine_port import CONFIG, running_port
from tests.integration.replicas.thawed import until_back
from tests.unit.triton.contract import Rig, call

pytestmark = pytest.mark.mesh

SLACK_S = 2.0
"""Delay that a busy machine may add to a limit."""


def send(pids: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to each of `pids` that exists."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


async def test_a_frozen_engine_is_lost_and_serves_again_after_sigcont(tmp_path: Path) -> None:
    """Server and model stopped: calls fail with a typed error within the limit. After SIGCONT the engine serves and
    holds no blocks of them.
    """
    engine = engine_part(CONFIG, tmp_path, "--step-s", "0.05", "--handoff-timeout-s", "60")
    engine.start()
    frozen: list[int] = []
    try:
        await until(lambda: engine_ready(engine.address), START_S_MAX, "engine ready")
        async with running_port(engine.address, []) as (rig, _):
            for number in range(4):
                rig.engine.start(number, call(name=f"g-{number}", max_output_tokens=150))
            await rig.until(lambda: all(rig.sink.heard(number).ids for number in range(4)))
            frozen = family(engine.pid)
            assert len(frozen) > 1, "the model runs in a process of its own"
            send(frozen, signal.SIGSTOP)
            # The response with the handoff is made after SIGCONT, and no caller waits for it.
            rig.engine.start(10, call(CallKind.CONTEXT_ONLY, "c-10"))
            lost_s = await until(
                lambda: not rig.sink.is_ready, SERVER_TIMEOUT_S + SLACK_S, "the engine is lost"
            )
            assert lost_s > SERVER_TIMEOUT_S - 1.3, "a load report was late, and no other message"
            for number in (0, 1, 2, 3, 10):
                assert isinstance(rig.sink.heard(number).error, EngineLost), number
            late = await rig.run(20, call(name="late"))
            assert isinstance(late.error, EngineLost), "a call to a lost engine waits for nothing"
            send(frozen, signal.SIGCONT)
            frozen = []
            await until_back(engine, lambda: rig.sink.is_ready, "the engine is back")
            assert (await rig.run(21, call(name="again"))).error is None
            await idle(rig)
    finally:
        send(frozen, signal.SIGCONT)
        await engine.end()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_lost_model_of_a_running_server_is_detected(tmp_path: Path, number: signal.Signals) -> None:
    """Only the stub is dead: its calls fail with a typed error, however long tritonserver would keep them open."""
    engine = engine_part(CONFIG, tmp_path, "--step-s", "0.02")
    engine.start()
    model: list[int] = []
    try:
        await until(lambda: engine_ready(engine.address), START_S_MAX, "engine ready")
        async with running_port(engine.address, []) as (rig, _):
            rig.engine.start(1, call(max_output_tokens=400))
            await rig.until(lambda: bool(rig.sink.heard(1).ids))
            model = family(engine.pid)[1:]
            send(model, number)
            await until(rig.sink.heard(1).is_over, MODEL_TIMEOUT_S + SLACK_S, "the call is over")
            assert isinstance(rig.sink.heard(1).error, EngineLost), rig.sink.heard(1).error
    finally:
        await engine.end()
        send(model, signal.SIGKILL)


async def idle(rig: Rig) -> None:
    """Wait until the engine holds no blocks of any call."""

    def is_idle() -> bool:
        load = rig.sink.load
        assert load is not None
        return not load.sequences_running and not load.handoffs_held and load.blocks_free == load.blocks_total

    await until(is_idle, 5, f"the engine holds nothing: {rig.sink.load}")
    # The engine's report and the last response of a call come on two streams.
    await until(lambda: not rig.engine.open_calls(), 5, "no call is open")
