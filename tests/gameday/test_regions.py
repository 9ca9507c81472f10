"""Two regions in containers serve alone, and reach each other and their clients through the link only."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from kvmesh.config import MeshConfig
from kvmesh.config_sections import Trust
from kvmesh.redis_link import RedisLink, key
from tests.certificates import Folder
from tests.gameday import ask
from tests.integration.containers import daemon, ownership
from tests.integration.containers.plan import IMAGES, SERVICE_IMAGE
from tests.integration.containers.regions import CLIENTS, RegionsMesh, regions_mesh
from tests.integration.containers.sidecar import FAULTS_IMAGE
from tests.integration.containers.station import Station
from tests.integration.generation import generate, token_request
from tests.integration.live_mesh import configure

pytestmark = [pytest.mark.mesh, pytest.mark.asyncio(loop_scope="module")]

REGIONS = ("eu", "us")
DEADLINE_S = 3.0

CONNECT = """
import socket, sys
host, _, port = sys.argv[1].rpartition(":")
try:
    socket.create_connection((host, int(port)), 1.5).close()
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""


def region_config() -> MeshConfig:
    """Return the configuration of a region with one prefill and one decode replica."""
    return configure(
        engine={"arithmetic": "hashed", "kv_blocks": 512, "max_sequence_tokens": 2048},
        prefill={"replicas": 1},
        decode={"replicas": 1},
        control={"replicas": 1},
    )


class GameDay:
    """The regions, and a station of clients."""

    def __init__(self, regions: RegionsMesh, clients: Station) -> None:
        self.regions = regions
        self._clients = clients

    async def asked(self, region: str) -> str:
        """Return the status of a request that a client outside all regions sends to the region."""
        (frontend,) = self.regions.frontends(region)
        program = ("python", "-m", ask.__name__, frontend, str(DEADLINE_S))
        answer = json.loads(await self._clients.run(*program, timeout_s=20))
        assert len(answer["ids"]) == (ask.OUTPUT_TOKENS if answer["code"] == "OK" else 0)
        return str(answer["code"])

    async def connects(self, here: str, there: str) -> str:
        """Return the result of a connection from the control plane of one region to that of another one."""
        part = self.regions.regions[here].parts["control-0"]
        (address,) = self.regions.controls(there)
        done = await part.in_thread(
            lambda: part.docker.exec_run(["python3", "-S", "-E", "-c", CONNECT, address])
        )
        return str(done.output.decode().strip())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(
    tmp_path_factory: pytest.TempPathFactory, needs_images: Callable[..., None]
) -> AsyncIterator[GameDay]:
    """Two running regions, of which nothing is left at the end."""
    needs_images(*IMAGES.values(), SERVICE_IMAGE, FAULTS_IMAGE)
    regions = RegionsMesh(dict.fromkeys(REGIONS, region_config()), tmp_path_factory.mktemp("regions"))
    try:
        await regions.start()
        yield GameDay(regions, await regions.station())
    finally:
        await regions.stop()
    with daemon.connected() as client:
        for run in (regions.link.run, *(mesh.run for mesh in regions.regions.values())):
            assert ownership.left_of(client, run) == []


@pytest_asyncio.fixture(loop_scope="module")
async def day(started: GameDay) -> AsyncIterator[GameDay]:
    """Two regions without a fault."""
    yield started
    await started.regions.link.heal()
    for region in REGIONS:
        await started.regions.restart_region(region)


async def test_each_region_has_its_own_redis_and_knows_the_control_planes_of_all(day: GameDay) -> None:
    """Each Redis belongs to its region, and every configuration names the control planes of both, which connect."""
    for region, mesh in day.regions.regions.items():
        redis = RedisLink(f"redis://{mesh.parts['redis'].address}/0")
        assert await redis.execute("GET", key(mesh.config.mesh.name, "region")) == region.encode()
        await redis.close()
        tables = {name: list(table.control) for name, table in mesh.config.regions.items()}
        assert tables == {name: day.regions.controls(name) for name in REGIONS}
    assert await day.connects("eu", "us") == await day.connects("us", "eu") == "connected"
    assert [await day.asked(region) for region in REGIONS] == ["OK", "OK"]


async def test_a_cut_between_regions_leaves_their_clients(day: GameDay) -> None:
    """Regions that are cut off from each other, or that only one still hears, both serve their clients."""
    await day.regions.link.cut("eu", "us", is_directed=True)
    assert await day.connects("eu", "us") == await day.connects("us", "eu") == "TimeoutError"
    await day.regions.link.cut("eu", "us")
    assert [await day.asked(region) for region in REGIONS] == ["OK", "OK"]


async def test_an_isolated_region_serves_only_this_machine(day: GameDay) -> None:
    """A region cut off from everything is lost to clients outside; the other one serves, and tests still observe both."""
    await day.regions.link.isolate("eu")
    assert await day.asked("eu") in ("UNAVAILABLE", "DEADLINE_EXCEEDED") and await day.asked("us") == "OK"
    assert (await day.regions.regions["eu"].status("router-0")).replicas
    await day.regions.link.heal("eu", CLIENTS)
    assert await day.asked("eu") == "OK"
    assert await day.connects("us", "eu") == "TimeoutError"


async def test_a_killed_region_comes_back_at_its_addresses(day: GameDay) -> None:
    """After SIGKILL of every process the region answers nothing; after a restart it serves, also through the link."""
    await day.regions.kill_region("us")
    assert not day.regions.regions["us"].running("frontend", "router", "prefill", "decode", "control")
    assert await day.asked("us") != "OK" and await day.asked("eu") == "OK"
    await day.regions.restart_region("us")
    assert await day.asked("us") == "OK"
    assert await day.connects("eu", "us") == "connected"


async def test_parts_of_one_region_are_killed_alone(day: GameDay) -> None:
    """Redis, the control plane and the decode pool of a region end without any process of the other one."""
    await day.regions.kill_redis("eu")
    await day.regions.kill_control("eu")
    await day.regions.kill_role("eu", "decode")
    ended = {name for name, part in day.regions.regions["eu"].parts.items() if not part.is_running}
    assert ended == {"redis", "control-0", "decode-0", "decode-0-engine"}
    assert not await day.regions.regions["us"].fallen()
    assert await day.asked("us") == "OK"


async def test_regions_serve_with_certificates(needs_images: Callable[..., None], tmp_path: Path) -> None:
    """A region with [trust] starts and serves, and this machine asks its processes as operator."""
    needs_images(*IMAGES.values(), SERVICE_IMAGE, FAULTS_IMAGE)
    certificates = Folder(tmp_path / "certificates")
    for secret in certificates.path.glob("*.key"):
        secret.chmod(0o644)
    trust = msgspec.convert(certificates.section(), Trust)
    trusted = msgspec.structs.replace(region_config(), trust=trust)
    async with regions_mesh({"eu": trusted}, tmp_path / "regions") as regions:
        answer = await generate(
            regions.regions["eu"].client(), token_request(ask.PROMPT, max_output_tokens=ask.OUTPUT_TOKENS)
        )
        assert (answer.error, len(answer.ids)) == (None, ask.OUTPUT_TOKENS)
        assert not regions.regions["eu"].config.region.insecure
