"""Control planes of two regions, each with a Redis of its own, exchange news and obey their own operators."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from controlplane.main import ControlProcess
from controlplane.region_parts import region_control_of
from controlplane.regions.settings import RegionSettings
from kvmesh.config import build
from kvmesh.control.v1 import region_pb2 as pb
from kvmesh.control.v1 import region_pb2_grpc
from kvmesh.membership.member import Member
from kvmesh.ports import free_ports
from kvmesh.redis_link import RedisLink
from kvmesh.snapshot.regions import DeclaredState, RegionEntry
from kvmesh.tenants.store import change, read_overrides
from tests.integration.control.control_process import control, leading, until
from tests.integration.regions import two_regions
from tests.integration.router.conftest import RedisServer
from tests.patience import patience

NAMES = ("eu", "us")

StartRedis = Callable[[], Awaitable[RedisServer]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the regions of all control processes at ten times their speed, and end takeovers early: no service is there."""
    settings = RegionSettings().scaled(0.1)
    monkeypatch.setattr("controlplane.main.region_control_of", partial(region_control_of, settings=settings))
    monkeypatch.setattr("controlplane.core.TAKEOVER_S", 0.5)


@pytest.fixture
async def redis_servers(tmp_path: Path) -> AsyncIterator[Callable[[], Awaitable[RedisServer]]]:
    """Start one Redis for each call."""
    started: list[RedisServer] = []

    async def start() -> RedisServer:
        folder = tmp_path / f"redis-{len(started)}"
        folder.mkdir()
        server = RedisServer(folder)
        await server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


@dataclass
class Cell:
    """The control plane of one region, and its Redis."""

    name: str
    url: str
    process: ControlProcess

    def entry(self, region: str) -> RegionEntry | None:
        """Return what the snapshot in force says about a region."""
        return self.process.core.content.region(region)


@asynccontextmanager
async def two_cells(redis_servers: StartRedis) -> AsyncIterator[dict[str, Cell]]:
    """Lead both regions, each with its own Redis."""
    ports = dict(zip(NAMES, free_ports("127.0.0.1", 2), strict=True))
    addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    async with AsyncExitStack() as stack:
        cells = {}
        for name in NAMES:
            url = (await redis_servers()).url
            config = two_regions(name, addresses)
            process = await stack.enter_async_context(control(url, config=config, listen=addresses[name]))
            cells[name] = Cell(name, url, process)
        for name, cell in cells.items():
            await until(lambda core=cell.process.core: core.publisher.published is not None, f"{name} leads")  # type: ignore[misc]  # mypy infers no lambda with defaults
        yield cells


@asynccontextmanager
async def operator(cell: Cell) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(cell.process.server.address) as channel:
        yield region_pb2_grpc.RegionServiceStub(channel)


def router(name: str, region: str) -> Member:
    return Member(
        process_id=name,
        role="router",
        address="127.0.0.1:9",
        boot_id=f"boot-{name}-{region}",
        model_version="kvmesh-1",
        block_tokens=32,
        pool="default",
        region=region,
        capabilities=("pools",),
    )


async def lease(url: str, member: Member) -> None:
    """Write the lease of a process for a minute."""
    link = RedisLink(url)
    await link.execute("SADD", "kvmesh:procs", member.process_id)
    await link.execute("SET", f"kvmesh:proc:{member.process_id}", msgspec.json.encode(member), "EX", 60)
    await link.close()


async def test_each_region_learns_the_processes_and_the_secret_of_the_other(
    redis_servers: StartRedis,
) -> None:
    """Routers are in the snapshot, the secret is in Redis alone, and equal names do not collide."""
    async with two_cells(redis_servers) as cells:
        link = RedisLink(cells["eu"].url)
        await link.execute("SET", "kvmesh:resume-secret", b"e" * 32)
        for name, cell in cells.items():
            await lease(cell.url, router("router-0", name))

        def knows(own: str, other: str) -> bool:
            entry = cells[own].entry(other)
            return entry is not None and [each.boot_id for each in entry.routers] == [
                f"boot-router-0-{other}"
            ]

        await until(
            lambda: knows("eu", "us") and knows("us", "eu"), "routers of the other region are published"
        )
        us = RedisLink(cells["us"].url)

        async def has_secret() -> bool:
            return bool(await us.execute("GET", "kvmesh:resume-secret:eu") == b"e" * 32)

        await until(has_secret, "the secret of eu arrives in the Redis of us")
        published = cells["us"].process.core.publisher.published
        assert published is not None and b"e" * 32 not in published.data
        await link.close()
        await us.close()


async def test_a_drain_of_unknown_load_needs_force_and_is_told_to_the_other_region(
    redis_servers: StartRedis,
) -> None:
    """The drain ramps, ends and is restored, and both regions follow it."""
    async with two_cells(redis_servers) as cells, operator(cells["eu"]) as eu, operator(cells["us"]) as us:
        regions = cells["us"].process.core.regions
        assert regions is not None
        await until(lambda: regions.heard_age_s("eu", 0.0) is not None, "us hears eu")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await eu.DrainRegion(pb.DrainRegionRequest(region="eu", reason="rack move"))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await eu.DrainRegion(pb.DrainRegionRequest(region="us", reason="rack move", force=True))
        assert 'region: "us" is unknown, allowed: eu' in (refused.value.details() or "")
        await eu.DrainRegion(pb.DrainRegionRequest(region="eu", reason="rack move", force=True))

        def is_at(own: str, state: DeclaredState, percent: int) -> bool:
            entry = cells[own].entry("eu")
            return entry is not None and (entry.declared, entry.weight_percent) == (state, percent)

        await until(lambda: all(is_at(own, DeclaredState.DRAINED, 0) for own in NAMES), "both see eu drained")
        listed = await us.ListRegions(pb.ListRegionsRequest())
        assert [each.region for each in listed.regions] == ["us", "eu"]
        assert listed.regions[1].declared.reason == "rack move"
        await eu.RestoreRegion(pb.RestoreRegionRequest(region="eu", reason="done"))
        await until(lambda: all(is_at(own, DeclaredState.SERVING, 100) for own in NAMES), "both see eu serve")


async def test_a_region_that_lost_its_memory_comes_back_as_it_was_declared(redis_servers: StartRedis) -> None:
    """Peers give a declaration back; its Redis and its process are new."""
    ports = dict(zip(NAMES, free_ports("127.0.0.1", 2), strict=True))
    addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    configs = {name: two_regions(name, addresses) for name in NAMES}
    us_url = (await redis_servers()).url
    async with leading(us_url, config=configs["us"], listen=addresses["us"]) as us:
        url = (await redis_servers()).url
        async with (
            leading(url, config=configs["eu"], listen=addresses["eu"]) as first,
            operator(Cell("eu", url, first)) as eu,
        ):
            await eu.DrainRegion(pb.DrainRegionRequest(region="eu", reason="fire", force=True))

            def is_drained_there() -> bool:
                entry = us.core.content.region("eu")
                return entry is not None and entry.declared is DeclaredState.DRAINED

            await until(is_drained_there, "us knows")
        url = (await redis_servers()).url
        async with control(url, config=configs["eu"], listen=addresses["eu"]) as second:

            def is_drained() -> bool:
                entry = second.core.content.region("eu")
                return entry is not None and entry.declared is DeclaredState.DRAINED

            await until(is_drained, "eu is drained again")

            def is_written_down() -> bool:
                declared = second.core.library.desired.regions.declared.get("eu")
                return declared is not None and declared.reason == "fire"

            await until(is_written_down, "it is written down")


async def test_a_new_leader_of_a_region_is_found_and_overrides_arrive(redis_servers: StartRedis) -> None:
    """The first configured process leaves; the other one leads, is dialled, and gets an operator's change of a tenant."""
    ports = free_ports("127.0.0.1", 3)
    first, second, other = (f"127.0.0.1:{port}" for port in (next(ports), next(ports), next(ports)))
    tables = {
        "regions": {"eu": {"control": [first, second]}, "us": {"control": [other]}},
        "tenants": {"search": {}},
        "engine": {"arithmetic": "hashed"},
    }
    eu, us = (build({"region": {"name": name}, **tables}) for name in NAMES)
    eu_url, us_url = (await redis_servers()).url, (await redis_servers()).url
    async with leading(us_url, config=us, listen=other) as watcher:
        regions = watcher.core.regions
        assert regions is not None
        async with control(eu_url, config=eu, listen=second, name="control-1") as heir:
            async with control(eu_url, config=eu, listen=first, name="control-0"):
                await until(lambda: regions.heard_age_s("eu", 0.0) is not None, "us hears eu")
            await until(lambda: heir.core.publisher.published is not None, "the other process leads")
            link = RedisLink(eu_url)
            made = await change(link, "kvmesh", "tenant:search", lambda _: {"weight": 7.0})
            await link.close()
            there = RedisLink(us_url)

            async def has_change() -> bool:
                return (await read_overrides(there, "kvmesh"))[0].get("tenant:search") == made

            await until(has_change, "the change arrives in the other region")
            await there.close()


async def test_a_stranger_is_refused_with_the_allowed_regions(redis_servers: StartRedis) -> None:
    """A region that is not configured, or claims the own name, gets no news."""
    async with AsyncExitStack() as stack:
        cells = await stack.enter_async_context(two_cells(redis_servers))
        channel = await stack.enter_async_context(
            grpc.aio.insecure_channel(cells["eu"].process.server.address)
        )
        for name in ("ap", "eu"):
            call = region_pb2_grpc.RegionServiceStub(channel).Federate()  # type: ignore[call-arg]  # stubs want an iterator
            await call.write(pb.FederateRequest(news=pb.RegionNews(region=name, sequence=1)))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async with patience(5):
                    while isinstance(await call.read(), pb.FederateResponse):
                        pass
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "one of us" in (refused.value.details() or "") + str(refused.value.trailing_metadata())
