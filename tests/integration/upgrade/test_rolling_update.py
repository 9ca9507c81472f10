"""A rolling update of each role as Kubernetes does it, with the settings of deploy/kubernetes, loses no stream.

Controllers and kubelets of the test replace the pods of one role: containers with new addresses, and with new names unless
the role is a StatefulSet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from kvmesh.config import MeshConfig
from kvmesh.membership.membership import read_members
from kvmesh.redis_link import RedisLink
from kvmesh.roles import CONTROL, SERVICES
from kvmesh.server import BATCHED
from kvmesh.snapshot.control_processes import read_control_processes
from tests.chaos.truth import Truth
from tests.integration.containers.mesh import ContainerMesh
from tests.integration.live_mesh import ROOT, configure, until
from tests.integration.upgrade.controllers import DeploymentController, controller_of
from tests.integration.upgrade.load import Load, streams
from tests.integration.upgrade.pods import Pods
from tests.integration.upgrade.rollout_settings import DEPLOYMENT, rendered_settings
from tests.integration.upgrade.service_address import service_address

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(600)]

CLIENTS: Final = 16
STREAMS: Final = 8
"""Complete streams of each load before and behind the update."""

REPLICAS: Final = 2
LONG_TOKENS: Final = 500
"""20 s: a client gives a request up that is refused for 10 s."""

RENDERED: Final = ROOT / "deploy/kubernetes/rendered/laptop.yaml"
SETTINGS: Final = rendered_settings(RENDERED.read_text(encoding="utf-8"), (*SERVICES, CONTROL))


def settings() -> MeshConfig:
    """Two of each role; engines that make some 25 tokens a second per stream."""
    return configure(
        engine={"arithmetic": "hashed", "step_s": 0.04, "prefill_token_s": 0.0001},
        router={"replicas": REPLICAS},
        frontend={"replicas": REPLICAS},
        control={"replicas": REPLICAS},
    )


async def leases(mesh: ContainerMesh) -> dict[str, tuple[str, str]]:
    """Return boot id and address of each process with a lease, by its name."""
    link = RedisLink(f"redis://{mesh.parts['redis'].address}/0")
    try:
        members = await read_members(link, mesh.config.mesh.name)
        controls = await read_control_processes(link, mesh.config.mesh.name)
    finally:
        await link.close()
    found = {member.process_id: (member.boot_id, member.address) for member in members}
    return found | {process.process_id: (process.boot_id, process.address) for process in controls}


async def linked(mesh: ContainerMesh) -> dict[str, dict[str, str]]:
    """Return the address of each replica at each router."""
    return {
        name: {view.replica: view.address for view in (await mesh.status(name)).replicas}
        for name in mesh.running("router")
    }


def loads_of(mesh: ContainerMesh, known: Sequence[str], service: str, pods: Pods) -> list[Load]:
    """Return the loads: callers with all addresses and new clients, and callers behind the one address of a Service.

    Some streams behind the Service are long. They keep the connection of their client, which starts others meanwhile.
    """
    truth = Truth(mesh.config.engine.salt, mesh.config.engine.max_sequence_tokens)
    wanted = streams(7)
    mixed = [
        replace(stream, max_output_tokens=LONG_TOKENS) if stream.number % 12 == 0 else stream
        for stream in wanted
    ]
    return [
        Load(known, truth, wanted, CLIENTS, current=lambda: pods.addresses("frontend")),
        Load([service], truth, mixed, CLIENTS // 2),
    ]


async def replaced(mesh: ContainerMesh, pods: Pods, role: str) -> list[Load]:
    """Replace all pods of `role` under load, and return the loads. Frontends are also called through a Service."""
    controller = controller_of(pods, role)
    known = pods.addresses("frontend")
    if isinstance(controller, DeploymentController) and role == "frontend":
        known = [*known, *controller.new_addresses]
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(service_address(lambda: pods.addresses("frontend")))
        # A draining frontend of grpcio cannot send clients on: see MeshServer.send_clients_on.
        has_service = role == "frontend" and mesh.config.frontend.edge == BATCHED
        loads = loads_of(mesh, known, service, pods)[: 2 if has_service else 1]
        for load in loads:
            await stack.enter_async_context(load.running())
        await asyncio.gather(*(load.more(STREAMS) for load in loads))
        await controller.roll()
        await asyncio.gather(*(load.more(STREAMS) for load in loads))
    return loads


async def check_names(mesh: ContainerMesh, before: dict[str, tuple[str, str]], role: str) -> None:
    """Wait until the leases and the routers have the new processes of `role`, and the old ones of all other roles."""
    wanted = {
        name: part.address
        for name, part in mesh.parts.items()
        if name != "redis" and not name.endswith("-engine")
    }

    async def has_all() -> bool:
        return {name: address for name, (_, address) in (await leases(mesh)).items()} == wanted

    await until(has_all, 10, f"exactly these have leases: {wanted}", every_s=0.05)
    boots = {name: boot for name, (boot, _) in (await leases(mesh)).items()}
    new = {name for name, boot in boots.items() if before.get(name, ("", ""))[0] != boot}
    assert new == set(mesh.running(role))
    assert (new <= before.keys()) == (SETTINGS[role].kind != DEPLOYMENT)
    await mesh.placeable()
    replicas = {name: mesh.parts[name].address for name in mesh.running("prefill", "decode")}
    assert all(seen == replicas for seen in (await linked(mesh)).values())


@pytest.mark.parametrize(
    "role",
    [pytest.param(role, marks=() if role == "decode" else pytest.mark.upgrade) for role in SETTINGS],
)
async def test_a_rolling_update_of_a_role_loses_nothing(
    needs_images: Callable[..., None], tmp_path: Path, role: str
) -> None:
    """All drains end within the grace period, and no role is ever short of ready pods."""
    needs_images("kvmesh:dev", "kvmesh-engine:dev", "kvmesh-redis:dev")
    mesh = ContainerMesh(settings(), tmp_path)
    pods, loop = Pods(mesh, SETTINGS), asyncio.get_running_loop()
    try:
        await mesh.start()
        before = await leases(mesh)
        async with pods.probed():
            began_s = loop.time()
            loads = await replaced(mesh, pods, role)
            took_s = loop.time() - began_s
            await check_names(mesh, before, role)
        assert [load.failures for load in loads] == [[] for _ in loads]
        assert {end.name: end.tail for end in pods.ends if end.status} == {}
        assert pods.least == {
            each: REPLICAS - SETTINGS[each].max_unavailable * (each == role) for each in SETTINGS
        }
        assert pods.lapses == []
        assert await mesh.fallen() == {}
        await mesh.idle(20)
        drained_s = max(end.seconds for end in pods.ends)
        print(
            f"{role}: {sum(load.completed for load in loads)} streams in {took_s:.0f} s, "
            f"{sum(load.resumes for load in loads)} went on elsewhere, "
            f"{sum(load.recomputed for load in loads)} tokens computed again, "
            f"longest pause {max(load.pause_s_max for load in loads):.2f} s, "
            f"SIGTERM to end at most {drained_s:.1f} s of {SETTINGS[role].grace_s:g} s"
        )
    except BaseException:
        print(*pods.events, sep="\n")
        raise
    finally:
        await mesh.stop()
