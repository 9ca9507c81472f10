"""Parts that fall silent or are told to stop under sixteen streams: no token lost, a short pause, and soon back in use."""

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

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

OUTPUT_TOKENS = 120
HEARTBEAT_TIMEOUT_S = 6.0
"""Longer than a silence takes to be noticed."""

PAUSE_MAX_S = 7.0
"""The aim is 4 s, of which 3 are the silence; a busy machine adds to it."""

BACK_MAX_S = 6.0
"""The aim is 2 s."""


def config() -> MeshConfig:
    """Two routers, and every prompt computed by a prefill replica: nothing is served from cache alone."""
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
    """A mesh whose engines reuse nothing."""
    with lent_mesh(config(), tmp_path_factory.mktemp("uncached"), ("--no-prefix-reuse",)) as made:
        yield made


@pytest.fixture
async def uncached(without_cache: LentMesh) -> AsyncIterator[Mesh]:
    """The module's mesh, whole and idle."""
    async with without_cache.lease() as mesh:
        yield mesh


def assert_survived(run: Run, what: str) -> None:
    """Assert that nothing was lost and nobody waited for long."""
    assert not run.wrong, f"{what}: {run.wrong}"
    assert run.longest_pause_s < PAUSE_MAX_S, f"{what}: a client waited for {run.longest_pause_s:.1f} s"


async def test_a_frozen_engine_costs_a_pause_and_is_used_again(uncached: Mesh) -> None:
    """SIGSTOP of a decode replica's Triton, then of a prefill's: nothing lost; thawed, they serve and hold nothing."""
    mesh = uncached
    wanted = requests(1, OUTPUT_TOKENS)
    expected = await undisturbed(mesh, wanted)
    for part in ("decode-0-engine", "prefill-0-engine"):
        pids = family(mesh.parts[part].pid)

        async def freeze(pids: list[int] = pids) -> None:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(HEARTBEAT_TIMEOUT_S)
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
            began_s = asyncio.get_running_loop().time()
            await mesh.placeable()
            assert asyncio.get_running_loop().time() - began_s < BACK_MAX_S

        assert_survived(await run_through(mesh, wanted, expected, freeze), f"{part} frozen")
        await mesh.idle(10)


async def test_a_stopped_service_costs_nothing(uncached: Mesh) -> None:
    """SIGTERM of a router, a prefill and a decode service in turn: each drains, nothing is lost or computed again."""
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
