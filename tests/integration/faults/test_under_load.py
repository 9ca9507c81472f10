"""Parts that freeze or get SIGTERM under 16 streams: no token is lost, pauses are short, and they return to
use.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from kvmesh.config import MeshConfig
from tests.family import family
from tests.integration.faults.conftest import STEP_S
from tests.integration.faults.streams import Run, requests, run_through, undisturbed
from tests.integration.harness import Mesh, configure
from tests.integration.lent_mesh import LentMesh, lent_mesh
from tests.integration.replicas.thawed import until_back
from tests.patience import quiet_s

pytestmark = pytest.mark.mesh

OUTPUT_TOKENS = 120
HEARTBEAT_TIMEOUT_S = 6.0
"""Longer than the detection of a frozen part takes."""

PAUSE_MAX_S = 7.0
"""The target is 4 s, with 3 s for the detection; a busy machine adds to it."""

BACK_MAX_S = 6.0
"""The target is 2 s."""


def config() -> MeshConfig:
    """Return a configuration with two routers, and every prompt computed by a prefill replica.

    No prompt is served from cache alone.
    """
    return configure(
        engine={
            "arithmetic": "hashed",
            "kv_blocks": 512,
            "prefill_kv_blocks": 512,
            "step_s": STEP_S,
            "prefill_token_s": 0.0001,
        },
        router={"replicas": 2, "snapshot_interval_s": 2.0},
    )


@pytest.fixture(scope="module")
def without_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LentMesh]:
    """A mesh of engines without cache reuse."""
    with lent_mesh(config(), tmp_path_factory.mktemp("uncached"), ("--no-prefix-reuse",)) as made:
        yield made


@pytest.fixture
async def uncached(without_cache: LentMesh) -> AsyncIterator[Mesh]:
    """The module's mesh, complete and idle."""
    async with without_cache.lease() as mesh:
        yield mesh


def assert_survived(run: Run, what: str) -> None:
    """Assert that no token was lost and no client waited for more than PAUSE_MAX_S."""
    assert not run.wrong, f"{what}: {run.wrong}"
    assert run.longest_pause_s < PAUSE_MAX_S, f"{what}: a client waited for {run.longest_pause_s:.1f} s"


async def test_a_frozen_engine_costs_a_pause_and_is_used_again(uncached: Mesh) -> None:
    """A frozen Triton costs a pause and no token; after SIGCONT it serves again and holds nothing.

    First Triton of a decode replica, then of a prefill replica, gets SIGSTOP.
    """
    mesh = uncached
    wanted = requests(1, OUTPUT_TOKENS)
    expected = await undisturbed(mesh, wanted)
    for part in ("decode-0-engine", "prefill-0-engine"):
        pids = family(mesh.parts[part].pid)

        async def freeze(part: str = part, pids: list[int] = pids) -> None:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(HEARTBEAT_TIMEOUT_S)
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
            began_s = quiet_s()
            placeable = asyncio.create_task(mesh.placeable())
            has_gone_on = await until_back(mesh.parts[part], placeable.done, f"{part} is used again")
            await placeable
            assert not has_gone_on or quiet_s() - began_s < BACK_MAX_S

        assert_survived(await run_through(mesh, wanted, expected, freeze), f"{part} frozen")
        await mesh.idle(10)


async def test_a_stopped_service_costs_nothing(uncached: Mesh) -> None:
    """A router, a prefill and a decode service drain after SIGTERM: no token is lost or recomputed."""
    mesh = uncached
    wanted = requests(2, OUTPUT_TOKENS)
    expected = await undisturbed(mesh, wanted)
    for part in ("router-0", "prefill-0", "decode-0"):

        async def stop(part: str = part) -> None:
            assert await mesh.parts[part].end(signal.SIGTERM) == 0
            await mesh.start(part)

        run = await run_through(mesh, wanted, expected, stop)
        assert_survived(run, f"{part} stopped")
        assert run.recomputed_tokens == 0 and run.attempts == run.answers, f"{part}: {run}"
        if part == "router-0":
            assert run.takeovers, "the other router took nothing over"
        await mesh.idle(10)
