"""Replicas that are held, on real processes under load: the others serve, and an order puts the fresh one into use."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from kvmesh.control.v1 import snapshot_pb2 as pb
from tests.integration.harness import running_mesh, until
from tests.integration.probes import READY, check_pages, metrics_address, until_probed
from tests.integration.whole.test_cordons import CONFIG, Load, Plane, loaded, planned
from tests.patience import quiet_s

pytestmark = pytest.mark.mesh

IN_USE_S_MAX = 2.0
"""Longest time from an order until every router places on the replica."""


async def test_a_fresh_replica_is_used_once_it_is_ordered_into_service(tmp_path: Path) -> None:
    """A restart of the service and a restart of the engine, of both roles. No request is lost."""
    async with running_mesh(CONFIG, tmp_path) as mesh, planned(mesh) as plane:
        plane.server.drives_lives = True
        plane.server.cut()
        async with loaded(mesh) as load:
            await load.more(10)
            for name in ("decode-0", "prefill-1"):
                await check_service(plane, load, name)
                await check_engine(plane, load, name)
        await mesh.idle(20)


async def check_service(plane: Plane, load: Load, name: str) -> None:
    """Start the service alone anew. Nothing is placed on it before the order."""
    part = plane.mesh.parts[name]
    await part.end(signal.SIGTERM)
    plane.server.reports.pop(name, None)
    await plane.mesh.launch([part])
    await plane.mesh.ready(part)
    await plane.state(name, "starting", draining=True)
    await plane.placeable(name, False)
    await load.more(10)
    assert await plane.running_at(name) == 0
    assert await plane.health(name)
    probes = metrics_address(part.log)
    held = (503, "starting: held by the control plane until it is warm\n")
    await check_pages(probes, name.partition("-")[0], held)
    await ordered(plane, name, slow_start=False)
    await until_probed(probes, "/readyz", READY)
    await plane.until_busy(name)


async def check_engine(plane: Plane, load: Load, name: str) -> None:
    """Start the engine alone anew: its replica is held again."""
    life = plane.server.reports[name].life
    engine = plane.mesh.parts[f"{name}-engine"]
    await engine.end()
    await plane.mesh.launch([engine])
    await plane.mesh.ready(engine)
    await until(
        lambda: plane.server.reports[name].life.engine_boot_id not in ("", life.engine_boot_id),
        15,
        "a new boot",
    )
    await plane.state(name, "starting", draining=True)
    await load.more(10)
    assert await plane.running_at(name) == 0
    await ordered(plane, name, slow_start=True)
    for router in plane.mesh.running("router"):
        (view,) = [each for each in (await plane.mesh.status(router)).replicas if each.replica == name]
        assert view.load_report.slow_start_age_ms > 0 and not view.load_report.held
    await load.more(10)


async def ordered(plane: Plane, name: str, *, slow_start: bool) -> None:
    """Order a replica into service, and wait until every router places on it."""
    reports = plane.server.reports
    await until(
        lambda: name in reports and reports[name].life.engine_boot_id != "", 5, f"the report of {name}"
    )
    order = pb.LifeOrder(
        state=pb.REPLICA_STATE_SERVING,
        engine_boot_id=reports[name].life.engine_boot_id,
        proved=not slow_start,
        slow_start=slow_start,
    )
    began_s = quiet_s()
    plane.server.push(pb.WatchResponse(life_order=order))
    await plane.placeable(name, True)
    await plane.state(name, "serving", draining=False)
    assert quiet_s() - began_s < IN_USE_S_MAX
