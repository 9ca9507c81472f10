"""Two regions, each a whole mesh of its own: the client leaves a home that died or froze, and comes back after the rest."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis.asyncio

from kvmesh.client import Client, GenerationStream, RetryPolicy
from kvmesh.redis_link import key
from services.frontend.requests.resume_token import SECRET_BYTES
from tests.integration.client.test_lost_frontends import Reader, finish, prompts
from tests.integration.harness import Mesh, configure, until
from tests.integration.lent_mesh import LentMesh
from tests.patience import Patience, quiet_s

pytestmark = pytest.mark.mesh

STREAMS = 8
TOKENS = 300
SHORT = 4
"""Tokens of the requests that only show which region serves."""

RETRY_POLICY = RetryPolicy(rest_min_s=3.0, rest_max_s=12.0)
BACK_S = 1.5 * RETRY_POLICY.rest_min_s + 1.25 * 5
"""Longest time until a region that works again gets streams: the rest with its jitter, and the last backoff."""

SECRET = bytes(range(SECRET_BYTES))


class Region(Mesh):
    """A mesh whose Redis has SECRET before its frontends start, as if it were federated with the other one."""

    async def start(self, *names: str) -> None:
        """Start the named parts, or all."""
        if not names:
            await super().start("redis")
            async with redis.asyncio.Redis.from_url(f"redis://{self.parts['redis'].address}/0") as client:
                await client.set(key(self.config.mesh.name, "resume-secret"), SECRET)
            names = tuple(name for name in self.parts if name != "redis")
        await super().start(*names)

    @property
    def frontends(self) -> list[str]:
        """Addresses of the frontends."""
        return [part.address for name, part in self.parts.items() if name.startswith("frontend-")]

    def signal(self, sig: signal.Signals) -> None:
        """Send `sig` to all frontends."""
        for name in self.running("frontend"):
            os.kill(self.parts[name].pid, sig)


class LentRegion(LentMesh):
    """Lends a region."""

    def _new(self, folder: Path) -> Mesh:
        return Region(self._config, folder)


@dataclass(frozen=True)
class World:
    """The two regions."""

    eu: Region
    us: Region

    def client(self) -> Client:
        """Return a client with home in eu."""
        regions = {"us": self.us.frontends, "eu": self.eu.frontends}
        return Client(regions=regions, prefer="eu", retry_policy=RETRY_POLICY)


@pytest.fixture(scope="module")
def lent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LentRegion, LentRegion]]:
    """Region eu with two frontends and region us with one."""
    made = []
    for name, frontends in (("eu", 2), ("us", 1)):
        config = configure(
            engine={"arithmetic": "hashed", "step_s": 0.01},
            frontend={"replicas": frontends},
            prefill={"replicas": 1},
            decode={"replicas": 1},
            region={"name": name},
        )
        made.append(LentRegion(config, tmp_path_factory.mktemp(name)))
    try:
        yield made[0], made[1]
    finally:
        for each in made:
            asyncio.run(each.close())


@pytest.fixture
async def world(lent: tuple[LentRegion, LentRegion]) -> AsyncIterator[World]:
    """Both regions, complete and idle."""
    async with lent[0].lease() as eu, lent[1].lease() as us:
        assert isinstance(eu, Region) and isinstance(us, Region)
        yield World(eu, us)


def region_of(answer: GenerationStream) -> str:
    """Return the region that served the end of an answer."""
    assert answer.finish is not None
    return answer.finish.explanation.region


async def asked(client: Client) -> str:
    """Send a short request; return the region that served it."""
    answer = await client.generate("x", max_output_tokens=SHORT, explain=True, deadline_s=30).all()
    assert len(answer.ids) == SHORT
    return region_of(answer)


async def disturbed(
    world: World, client: Client, disturb: Callable[[], Awaitable[None]], pause_s_max: float
) -> None:
    """Run streams at home, run `disturb` when all have tokens. They end token-exact in the other region, as new ones do."""
    async with Client(world.us.frontends) as there:
        expected = await asyncio.gather(
            *(
                there.generate(prompt_tokens=each, max_output_tokens=TOKENS, seed=at).all()
                for at, each in enumerate(prompts(1, STREAMS))
            )
        )
    readers = [
        Reader(client.generate(prompt_tokens=each, max_output_tokens=TOKENS, seed=at, explain=True))
        for at, each in enumerate(prompts(1, STREAMS))
    ]
    async with asyncio.TaskGroup() as tasks:
        for reader in readers:
            tasks.create_task(reader.run())
        await until(lambda: all(len(each.generation.ids) > 20 for each in readers), 30, "all have tokens")
        await disturb()
        began_s = quiet_s()
        assert await asked(client) == "us"
        assert quiet_s() - began_s < pause_s_max
    for reader, other in zip(readers, expected, strict=True):
        assert reader.generation.ids == other.ids and reader.generation.text == other.text
        assert reader.generation.resumes and finish(reader).explanation.region == "us"
    print(f"longest pause {max(each.pause_s for each in readers):.2f} s")
    assert max(each.pause_s for each in readers) < pause_s_max


async def back(client: Client) -> float:
    """Send requests until home serves one; return the seconds. Each of them succeeds."""
    began_s, bound = time.monotonic(), Patience(BACK_S + 5)
    while await asked(client) == "us":
        assert not bound.is_over, "home gets no streams again"
    print(f"back after {time.monotonic() - began_s:.2f} s")
    return time.monotonic() - began_s


async def test_a_home_without_frontends_costs_a_pause(world: World) -> None:
    """kill -9 of all frontends of home: streams go on in the other region, new ones too, and come back after the rest."""

    async def kill() -> None:
        await asyncio.gather(*(world.eu.parts[name].end() for name in world.eu.running("frontend")))

    async with world.client() as client:
        await disturbed(world, client, kill, 5.0)
        for _ in range(20):
            assert await asked(client) == "us"
        await world.eu.start("frontend-0", "frontend-1")
        assert await back(client) >= RETRY_POLICY.rest_min_s
        for _ in range(20):
            assert await asked(client) == "eu"


async def test_a_dead_frontend_of_home_is_replaced_at_home(world: World) -> None:
    """kill -9 of one of two frontends: its streams go on at the other one, and the other region gets nothing."""
    async with world.client() as client:
        readers = [
            Reader(client.generate(prompt_tokens=each, max_output_tokens=TOKENS, seed=at, explain=True))
            for at, each in enumerate(prompts(2, STREAMS))
        ]
        async with asyncio.TaskGroup() as tasks:
            for reader in readers:
                tasks.create_task(reader.run())
            await until(lambda: all(len(each.generation.ids) > 20 for each in readers), 30, "all have tokens")
            await world.eu.parts["frontend-0"].end()
            assert [await asked(client) for _ in range(10)] == ["eu"] * 10
        assert any(each.generation.resumes for each in readers)
        assert {finish(each).explanation.region for each in readers} == {"eu"}


async def test_a_frozen_home_is_left_after_the_silence(world: World) -> None:
    """SIGSTOP of all frontends of home: found by probes within seconds; after SIGCONT and the rest streams come back."""

    async def freeze() -> None:
        world.eu.signal(signal.SIGSTOP)

    async with world.client() as client:
        try:
            await disturbed(world, client, freeze, 8.0)
        finally:
            world.eu.signal(signal.SIGCONT)
        assert await back(client) >= RETRY_POLICY.rest_min_s
