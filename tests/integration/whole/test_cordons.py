"""Cordons and drains by the control plane, on real processes under load: nothing is lost, and everything is reversible."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.membership.member import Member
from kvmesh.membership.membership import read_members
from kvmesh.redis_link import RedisLink
from kvmesh.snapshot.content import Content, Cordon
from kvmesh.snapshot.initial import initial_content
from kvmesh.snapshot.published import Published, Term, publish
from tests.integration.generation import Answer, generate, token_request
from tests.integration.harness import Mesh, configure, running_mesh, until
from tests.integration.probes import READY, metrics_address, probed
from tests.integration.scraped import sample
from tests.integration.snapshot.control_server import ControlServer, running_control

pytestmark = pytest.mark.mesh

CLIENTS = 6
TOKENS = 24
WORK = {
    "prefill": "kvmesh_prefill_computed_tokens_total",
    "decode": "kvmesh_decode_generated_tokens_total",
}
"""Counter of the work of a replica, by role."""

CONFIG = configure(
    engine={"arithmetic": "hashed", "step_s": 0.01},
    prefill={"replicas": 2},
    decode={"replicas": 2},
    router={"replicas": 2},
    frontend={"replicas": 2},
)


@dataclass
class Load:
    """Clients that send one request after another. Every request must end with all of its tokens."""

    mesh: Mesh
    answers: list[Answer] = field(default_factory=list)

    async def run(self, number: int) -> None:
        """Send requests until cancelled."""
        prompt = 0
        while True:
            prompt += 1
            ids = [(number * 977 + prompt * 31 + at) % 200 for at in range(48)]
            request = token_request(ids, max_output_tokens=TOKENS)
            self.answers.append(await generate(self.mesh.client(), request, timeout_s=30.0))

    async def more(self, count: int) -> None:
        """Wait until `count` more requests have ended, and check all."""
        wanted = len(self.answers) + count
        await until(lambda: len(self.answers) >= wanted, 60, f"{count} more answers")
        self.check()

    def check(self) -> None:
        """Raise AssertionError if a request has failed or lost tokens."""
        bad = [each for each in self.answers if each.error is not None or len(each.ids) != TOKENS]
        assert not bad, f"{len(bad)} of {len(self.answers)}: {bad[0]}"


@asynccontextmanager
async def loaded(mesh: Mesh) -> AsyncIterator[Load]:
    """Keep CLIENTS clients busy inside the block."""
    load = Load(mesh)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(load.run(number)) for number in range(CLIENTS)]
        yield load
        for task in tasks:
            task.cancel()
    load.check()


class Plane:
    """The control plane of a test: publishes cordons and waits for their effect."""

    def __init__(self, mesh: Mesh, server: ControlServer, redis: RedisLink) -> None:
        self.mesh = mesh
        self.server = server
        self.redis = redis
        self.version = 0

    async def publish(self, *cordons: Cordon, closed: bool = False) -> Published:
        """Publish these cordons, and wait until every process has applied them."""
        self.version += 1
        base = initial_content(self.mesh.config)
        published = publish(Term(1, "control-0"), self.version, Content(base.pools, cordons=cordons))
        self.server.publish(published)
        names = self.mesh.running("frontend", "router", "prefill", "decode")
        wanted = dict.fromkeys(names, f"1.control-0/{self.version}")
        await until(lambda: self.server.versions() == wanted, 15, f"{wanted}, but {self.server.versions()}")
        return published

    async def member(self, name: str) -> Member:
        """Return the lease of a process."""
        members = {
            each.process_id: each for each in await read_members(self.redis, self.mesh.config.mesh.name)
        }
        return members[name]

    async def state(self, name: str, state: str, *, draining: bool) -> None:
        """Wait until the lease of a process has this state."""

        async def is_shown() -> bool:
            members = await read_members(self.redis, self.mesh.config.mesh.name)
            return (name, state, draining) in [(one.process_id, one.state, one.draining) for one in members]

        await until(is_shown, 10, f"{name} is {state}")

    async def placeable(self, name: str, wanted: bool) -> None:
        """Wait until every router says whether it may place on a replica."""

        async def is_seen() -> bool:
            views = [
                view
                for router in self.mesh.running("router")
                for view in (await self.mesh.status(router)).replicas
            ]
            found = [view.placeable for view in views if view.replica == name]
            return found == [wanted] * len(self.mesh.running("router"))

        await until(is_seen, 10, f"{name} placeable: {wanted}")

    async def readiness(self, name: str) -> tuple[int, str]:
        """Return the status and the text of a process's /readyz."""
        return await probed(metrics_address(self.mesh.parts[name].log), "/readyz")

    async def running_at(self, name: str) -> int:
        """Return the requests that a replica holds."""
        load = (await self.mesh.status(name)).load_report
        return int(load.queued_request_count + load.running_request_count)

    async def until_idle(self, name: str) -> None:
        """Wait until the work of a replica has ended."""

        async def is_idle() -> bool:
            return await self.running_at(name) == 0

        await until(is_idle, 20, f"{name} idle")

    async def until_busy(self, name: str) -> None:
        """Wait until a replica has worked again. Its requests may be too short to be seen running."""
        counter = WORK[name.partition("-")[0]]
        before = await sample(self.mesh, name, counter)

        async def has_worked() -> bool:
            return await sample(self.mesh, name, counter) > before

        await until(has_worked, 20, f"{name} works")

    async def health(self, name: str) -> bool:
        """Return whether a process is SERVING."""
        stub = health_pb2_grpc.HealthStub(self.mesh.channel(name))
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def planned(mesh: Mesh) -> AsyncIterator[Plane]:
    """Run a control process beside the mesh."""
    url = f"redis://{mesh.parts['redis'].address}/0"
    redis = RedisLink(url)
    async with running_control(url, mesh.config.mesh.name) as server:
        plane = Plane(mesh, server, redis)
        await plane.publish()
        yield plane
    await redis.close()


async def test_cordons_and_drains_under_load_lose_nothing_and_are_reversed(tmp_path: Path) -> None:
    """Prefill, decode, router and frontend: out of use, their work ends, and they are in use again."""
    async with running_mesh(CONFIG, tmp_path) as mesh, planned(mesh) as plane:
        async with loaded(mesh) as load:
            await load.more(10)
            for name in ("decode-0", "prefill-1"):
                await check_replica(plane, load, name)
            await check_router(plane, load)
            await check_frontend(plane, load)
        assert not plane.server.rejected
        await mesh.idle(20)


async def check_replica(plane: Plane, load: Load, name: str) -> None:
    """Cordon and drain one replica."""
    boot_id = (await plane.member(name)).boot_id
    await plane.publish(Cordon(name, reason="test"))
    await plane.state(name, "cordoned", draining=True)
    await plane.placeable(name, False)
    assert await plane.health(name)
    assert await plane.readiness(name) == (503, "cordoned by the control plane: test\n")
    await plane.until_idle(name)
    await load.more(10)
    assert await plane.running_at(name) == 0
    await plane.publish(Cordon(name, boot_id, is_draining=True))
    await plane.state(name, "draining", draining=True)
    assert not await plane.health(name)
    assert await plane.readiness(name) == (503, "draining by the control plane\n")
    await load.more(10)
    await plane.publish()
    await plane.state(name, "serving", draining=False)
    await plane.placeable(name, True)
    await plane.until_busy(name)
    assert await plane.health(name)
    assert await plane.readiness(name) == READY
    assert (await plane.member(name)).boot_id == boot_id
    await plane.publish(Cordon(name, "another boot", is_draining=True))
    await plane.state(name, "serving", draining=False)


async def check_router(plane: Plane, load: Load) -> None:
    """Drain one of two routers: its attempts end, the other one serves, and both serve afterwards."""
    boot_id = (await plane.member("router-0")).boot_id
    await plane.publish(Cordon("router-0", boot_id, is_draining=True))
    await plane.state("router-0", "draining", draining=True)
    reports = plane.server.reports
    await until(lambda: not reports["router-0"].can_place, 10, "the report of the drain")
    await until(lambda: reports["router-0"].live_request_count == 0, 20, "router-0 idle")
    assert reports["router-1"].can_place
    assert await plane.readiness("router-0") == (503, "draining by the control plane\n")
    await load.more(10)
    await plane.publish()
    await until(lambda: plane.server.reports["router-0"].can_place, 10, "router-0 can place")
    await until(lambda: plane.server.reports["router-0"].live_request_count > 0, 20, "router-0 serves again")


async def check_frontend(plane: Plane, load: Load) -> None:
    """Drain the frontend without clients: it refuses as after SIGTERM, and serves when it is released."""
    stub = plane.mesh.client("frontend-1")
    request = token_request([1, 2, 3], max_output_tokens=4)
    boot_id = (await plane.member("frontend-1")).boot_id
    await plane.publish(Cordon("frontend-1"))
    await plane.state("frontend-1", "cordoned", draining=False)
    await until_health(plane, "frontend-1", False)
    assert await plane.readiness("frontend-1") == (503, "cordoned by the control plane\n")
    assert (await generate(stub, request)).error is None
    await plane.publish(Cordon("frontend-1", boot_id, is_draining=True))
    await plane.state("frontend-1", "draining", draining=True)
    refused = await generate(stub, request)
    assert refused.code is grpc.StatusCode.UNAVAILABLE, refused
    await plane.publish()
    await until_health(plane, "frontend-1", True)
    assert (await generate(stub, request)).error is None
    await load.more(5)


async def until_health(plane: Plane, name: str, wanted: bool) -> None:
    """Wait for the health of a process."""

    async def is_it() -> bool:
        return await plane.health(name) is wanted

    await until(is_it, 10, f"{name} healthy: {wanted}")


@pytest.mark.parametrize("role", ["router", "decode"])
async def test_a_process_knows_its_snapshot_after_a_restart_without_redis_data(
    tmp_path: Path, role: str
) -> None:
    """`--state` keeps it while Redis is empty, no control plane runs, and every other process is gone."""
    config = configure(engine={"arithmetic": "hashed"}, prefill={"replicas": 0}, decode={"replicas": 1})
    name = f"{role}-0"
    async with running_mesh(config, tmp_path) as mesh:
        url = f"redis://{mesh.parts['redis'].address}/0"
        redis = RedisLink(url)
        part = mesh.parts[name]
        await part.end()
        part.command = [*part.command, "--state", str(tmp_path / "state" / name)]
        await mesh.start(name)
        async with running_control(url, config.mesh.name) as server:
            plane = Plane(mesh, server, redis)
            plane.version = 6
            published = await plane.publish(Cordon("prefill-9"))
            file = tmp_path / "state" / name / "snapshot"
            await until(file.exists, 10, "the state file")
        for other in mesh.running("frontend", "router", "prefill", "decode"):
            await mesh.parts[other].end()
        await redis.execute("FLUSHALL")
        part.start()
        await mesh.ready(part)
        await plane.state(name, "serving", draining=False)
        assert (await plane.member(name)).snapshot == str(published.name) == "1.control-0/7"
        board = await redis.execute("HGET", f"{config.mesh.name}:snapshot", "data")
        assert board == published.data == pb.Snapshot.FromString(board).SerializeToString(deterministic=True)
        await redis.close()
