"""Two whole meshes that federate: streams of a region that died go on in the other one behind their own frontend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from kvmesh.client import Client, GenerationStream
from kvmesh.config import describe
from kvmesh.region_sections import RegionTable
from tests.integration.client.test_lost_frontends import Reader, finish, prompts
from tests.integration.harness import Mesh, configure, until
from tests.integration.scraped import sample

pytestmark = pytest.mark.mesh

STREAMS = 8
TOKENS = 150
SHORT = 4
"""Tokens of the requests that only show which region serves."""

CONTROL = "control-0"


class Region(Mesh):
    """A mesh with a control plane, in a region of its own."""

    def federate(self, addresses: dict[str, str]) -> None:
        """Write the configuration with the control planes of all regions. Before the start."""
        tables = {name: RegionTable(control=(address,)) for name, address in addresses.items()}
        self.config = msgspec.structs.replace(self.config, regions=tables)
        self._config_file.write_text(describe(self.config))


@dataclass(frozen=True)
class World:
    """The two regions."""

    eu: Region
    us: Region


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """Both regions, complete, and linked by the control planes."""
    made: dict[str, Region] = {}
    for name in ("eu", "us"):
        folder = tmp_path / name
        folder.mkdir()
        config = configure(
            engine={"arithmetic": "hashed", "step_s": 0.01},
            frontend={"replicas": 1},
            prefill={"replicas": 1},
            decode={"replicas": 1},
            control={"replicas": 1},
            warm_up={"mode": "none"},
            region={"name": name},
        )
        made[name] = Region(config, folder)
    addresses = {name: mesh.parts[CONTROL].address for name, mesh in made.items()}
    try:
        for mesh in made.values():
            mesh.federate(addresses)
        await asyncio.gather(*(mesh.start() for mesh in made.values()))
        for mesh in made.values():
            await until(lambda mesh=mesh: is_linked(mesh), 30, "both regions know each other")
        yield World(made["eu"], made["us"])
    finally:
        await asyncio.gather(*(mesh.stop() for mesh in made.values()))


async def is_linked(mesh: Mesh) -> bool:
    """Return whether the frontend has the routers of both regions, and the other region's secret."""
    known = [
        await sample(mesh, "frontend-0", f"kvmesh_frontend_{name}")
        for name in ("routers_up", "known_regions")
    ]
    return known == [2, 1]


def regions(answer: GenerationStream) -> list[str]:
    """Return the regions of the attempts of an answer."""
    assert answer.finish is not None
    return [attempt.region for attempt in answer.finish.explanation.attempts]


async def retries(mesh: Mesh) -> float:
    """Return the retries that the frontend paid from its budget, or would have."""
    names = ("kvmesh_frontend_budgeted_retries_total", "kvmesh_frontend_refused_retries_total")
    return sum([await sample(mesh, "frontend-0", name) for name in names])


async def whole(address: str) -> list[GenerationStream]:
    """Return the outputs of an undisturbed region."""
    async with Client([address]) as client:
        return list(
            await asyncio.gather(
                *(
                    client.generate(prompt_tokens=each, max_output_tokens=TOKENS, seed=at).all()
                    for at, each in enumerate(prompts(1, STREAMS))
                )
            )
        )


async def disturbed(
    client: Client, expected: Sequence[GenerationStream], disturb: Callable[[], Awaitable[object]]
) -> list[Reader]:
    """Run streams, run `disturb` when all have tokens, and return the streams. All are token-exact."""
    readers = [
        Reader(client.generate(prompt_tokens=each, max_output_tokens=TOKENS, seed=at, explain=True))
        for at, each in enumerate(prompts(1, STREAMS))
    ]
    async with asyncio.TaskGroup() as tasks:
        for reader in readers:
            tasks.create_task(reader.run())
        await until(lambda: all(len(each.generation.ids) > 20 for each in readers), 30, "all have tokens")
        await disturb()
    for reader, other in zip(readers, expected, strict=True):
        assert reader.generation.ids == other.ids and reader.generation.text == other.text
    print(f"longest pause {max(each.pause_s for each in readers):.2f} s")
    assert max(each.pause_s for each in readers) < 5.0
    return readers


async def test_streams_survive_the_frontend_of_their_region_and_the_rest_of_it(world: World) -> None:
    """kill -9 of the frontend: the other region's takes the running attempts over. Then of all behind it: see below."""
    expected = await whole(world.us.parts["frontend-0"].address)
    await without_its_frontend(world, expected)
    await without_its_replicas(world, expected)


async def without_its_frontend(world: World, expected: Sequence[GenerationStream]) -> None:
    """Streams resume at the other region's frontend, which accepts their tokens: nothing is computed again."""
    addresses = {
        name: [mesh.parts["frontend-0"].address] for name, mesh in (("eu", world.eu), ("us", world.us))
    }
    async with Client(regions=addresses, prefer="eu") as client:
        readers = await disturbed(client, expected, world.eu.parts["frontend-0"].end)
    for reader in readers:
        assert reader.generation.resumes and finish(reader).explanation.region == "us"
        assert set(regions(reader.generation)) == {"eu"} and finish(reader).explanation.adoption_count == 1
        assert not finish(reader).usage.recomputed_token_count
    assert await sample(world.us, "frontend-0", "kvmesh_frontend_guest_requests_total") == STREAMS
    await world.eu.start("frontend-0")
    await until(lambda: is_linked(world.eu), 30, "the new frontend knows both regions")


async def without_its_replicas(world: World, expected: Sequence[GenerationStream]) -> None:
    """Streams and new requests are served in the other region, token-exact, and no retry is paid.

    A router without replicas pays none either: its refusals move the requests. Home serves again once it can.
    """
    async with Client([world.eu.parts["frontend-0"].address]) as client:
        own = await client.generate("x", max_output_tokens=SHORT, explain=True, deadline_s=30).all()
        assert regions(own) == ["eu"]

        async def kill() -> None:
            await asyncio.gather(
                *(world.eu.parts[name].end() for name in ("decode-0", "prefill-0", "router-0"))
            )

        for reader in await disturbed(client, expected, kill):
            assert reader.generation.sends == 1 and regions(reader.generation)[-1] == "us"
            assert finish(reader).explanation.region == "eu"
        world.eu.parts["router-0"].start()
        await world.eu.ready(world.eu.parts["router-0"])
        answers = await asyncio.gather(
            *(
                client.generate(f"x{at}", max_output_tokens=SHORT, explain=True, deadline_s=30).all()
                for at in range(40)
            )
        )
        assert {regions(each)[-1] for each in answers} == {"us"}
        assert await retries(world.eu) == 0
        await world.eu.start("prefill-0", "decode-0")

        async def is_home() -> bool:
            answer = await client.generate("y", max_output_tokens=SHORT, explain=True, deadline_s=30).all()
            return regions(answer) == ["eu"]

        await until(is_home, 30, "home serves again")
