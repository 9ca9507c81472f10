"""Shadow traffic on a whole mesh: an A/A shadow, a target that never answers, and the end within a second."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engines.contract.publisher import LOAD_PERIOD_MAX_S
from kvmesh.config import MeshConfig, build
from kvmesh.control.v1 import shadow_pb2 as pb
from kvmesh.control.v1 import shadow_pb2_grpc
from kvmesh.triton.liveness import SERVER_TIMEOUT_S
from tests.integration.generation import generate, token_request
from tests.integration.harness import Mesh, running_mesh, until
from tests.integration.scraped import sample
from tests.patience import quiet_s

pytestmark = pytest.mark.mesh

IN_FLIGHT = "kvmesh_frontend_shadow_in_flight"


def configuration() -> MeshConfig:
    """Return a mesh with a stable pool, a young one of its version, and a control process."""
    one = {"routers": 1, "prefill": 1, "decode": 1}
    return build(
        {
            "engine": {"arithmetic": "hashed", "step_s": 0.002},
            "versions": {"v1": {}},
            "pools": {"stable": {"version": "v1", **one}, "young": {"version": "v1", **one}},
            "frontend": {"replicas": 1},
            "control": {"replicas": 1},
        }
    )


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    """A running mesh."""
    async with running_mesh(configuration(), tmp_path) as running:
        yield running


async def users(mesh: Mesh, count: int, first: int) -> list[float]:
    """Send `count` requests of as many sessions, and return their seconds. Each must end well."""
    seconds = []
    for number in range(first, first + count):
        request = token_request([100 + number % 50 + at for at in range(60)], max_output_tokens=20)
        request.session_id = f"session-{number}"
        began_s = quiet_s()
        found = await generate(mesh.client(), request)
        assert found.error is None and len(found.ids) == 20
        seconds.append(quiet_s() - began_s)
    return seconds


async def started(mesh: Mesh, stub: Any) -> None:
    """Start an A/A shadow of every session, as soon as the control plane has the reports of the routers."""
    settings = pb.Shadow(to_pool="young", sample_permille=1000, mode=pb.Shadow.MODE_FULL, token_max=1_000_000)
    last = ""

    async def is_started() -> bool:
        nonlocal last
        try:
            await stub.StartShadow(pb.StartShadowRequest(settings=settings))
        except Exception as error:  # noqa: BLE001  # not ready yet
            last = str(error)
            return False
        return True

    try:
        await until(is_started, 30, "the shadow starts", every_s=0.2)
    except AssertionError as error:
        raise AssertionError(f"{error}: {last}") from None


async def test_a_shadow_compares_and_a_dead_target_harms_nobody(mesh: Mesh) -> None:
    """Copies are compared; with the target's engines stopped users see nothing; a stop ends the copies within 1 s."""
    stub = shadow_pb2_grpc.ShadowServiceStub(mesh.channel("control-0"))
    await started(mesh, stub)

    async def is_copying() -> bool:
        return await sample(mesh, "frontend-0", "kvmesh_frontend_shadow_copying") == 1

    await until(is_copying, 10, "the frontend copies", every_s=0.05)
    await users(mesh, 30, 0)

    async def view() -> Any:
        return (await stub.GetShadow(pb.GetShadowRequest())).shadow

    async def is_compared() -> bool:
        counts = (await view()).counts
        return bool(counts.target.pairs + sum(counts.dropped.values()) == 30)

    await until(is_compared, 15, "each request is compared or dropped", every_s=0.2)
    found = await view()
    arm = found.counts.target
    assert found.aa and found.running and arm.pairs >= 25 and not arm.differences and not arm.errors
    assert arm.tokens == 20 * arm.pairs and found.counts.tokens == 80 * found.counts.copied
    assert await sample(mesh, "frontend-0", "kvmesh_frontend_requests_total") == 30
    before = await users(mesh, 20, 100)

    async def is_in_flight() -> bool:
        return await sample(mesh, "frontend-0", IN_FLIGHT) > 0

    async def is_idle() -> bool:
        return not await is_in_flight()

    engines = [
        part for name, part in mesh.parts.items() if name.startswith("young-") and name.endswith("-engine")
    ]
    assert len(engines) == 2
    await until(is_idle, 10, "the copies of these requests are over", every_s=0.02)
    frozen_s = time.monotonic()
    for engine in engines:
        os.kill(engine.pid, signal.SIGSTOP)
    try:
        during = await users(mesh, 40, 200)
        # Copies fail once the silence of the engines is noticed. A busy machine may get there. The silence began with the
        # last load report, up to a period before.
        silent_s = time.monotonic() - frozen_s + LOAD_PERIOD_MAX_S
        assert await is_in_flight() or silent_s > SERVER_TIMEOUT_S
        assert sorted(during)[len(during) // 2] < 0.5 + 3 * sorted(before)[len(before) // 2]
        stopped = await stub.StopShadow(pb.StopShadowRequest(reason="the target is dead"))
        assert stopped.was_running
        began_s = quiet_s()
        while await sample(mesh, "frontend-0", IN_FLIGHT):
            assert quiet_s() - began_s < 1.0, "copies run on"
            await asyncio.sleep(0.02)
    finally:
        for engine in engines:
            os.kill(engine.pid, signal.SIGCONT)
    await users(mesh, 5, 300)
    last = await view()
    assert not last.running and last.end_reason == "it was stopped"
    settled = await sample(mesh, "frontend-0", "kvmesh_frontend_requests_total")
    assert settled == 95, "a copy counts as no request"
    await mesh.idle(15)
