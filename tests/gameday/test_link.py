"""The link between sites delays, loses and cuts in given directions, and heals. `make gameday-link` runs it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.gameday import wire
from tests.gameday.wire import CONNECT_S_MAX
from tests.integration.containers import daemon, ownership
from tests.integration.containers.link import Link, running_link
from tests.integration.containers.plan import SERVICE_IMAGE
from tests.integration.containers.sidecar import FAULTS_IMAGE
from tests.integration.containers.station import Station
from tests.integration.live_mesh import accepts, until

pytestmark = [pytest.mark.mesh, pytest.mark.asyncio(loop_scope="module")]

SITES = ("eu", "us", "ap")
NEAR_S = 0.03
"""Longest quickest round trip without a delay, on a busy machine."""


class Wires:
    """A link with a peer at each site."""

    def __init__(self, link: Link, stations: dict[str, Station]) -> None:
        self.link = link
        self.stations = stations

    async def rtt_s(self, a: str, b: str) -> float:
        """Return the seconds of a round trip from `a` to `b`."""
        return float(await self._run(a, "rtt", b))

    async def send(self, a: str, b: str, count: int) -> None:
        """Send datagrams from `a` to `b`."""
        await self._run(a, "send", b, str(count))

    async def seen(self, a: str, b: str) -> int:
        """Return the count of datagrams from `a` that reached `b`, asked past the link."""

        def ask() -> bytes:
            with wire.connected(self.stations[b].ip) as connection:
                return wire.round_trip(connection, b"seen\n")

        return int(json.loads(await asyncio.to_thread(ask)).get(self.stations[a].ip, 0))

    async def arrived(self, a: str, b: str, count: int) -> int:
        """Return how many of `count` datagrams arrive, once no more do."""
        before = last = await self.seen(a, b)
        await self.send(a, b, count)

        async def is_over() -> bool:
            nonlocal last
            earlier, last = last, await self.seen(a, b)
            return last == earlier

        await until(is_over, 10, "no more datagrams arrive", every_s=0.1)
        return last - before

    async def connects(self, a: str, b: str) -> bool:
        """Return True if a connection from `a` to `b` can be opened."""
        try:
            await self._run(a, "rtt", b)
        except AssertionError as error:
            assert "timed out" in str(error) or "No route to host" in str(error), error
            return False
        return True

    async def bulk_s(self, a: str, b: str) -> float:
        """Return the seconds that 4 MB take from `a` to `b` and back."""
        return float(await self._run(a, "bulk", b))

    async def longest_s(self, a: str, b: str) -> float:
        """Return the seconds of the longest of many round trips of one connection from `a` to `b`."""
        return float(await self._run(a, "stay", b))

    async def _run(self, a: str, command: str, b: str, *more: str) -> str:
        program = ("python", "-S", "-E", "-m", wire.__name__, command, self.stations[b].ip, *more)
        return await self.stations[a].run(*program, timeout_s=40)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def every_wire(
    tmp_path_factory: pytest.TempPathFactory, needs_images: Callable[..., None]
) -> AsyncIterator[Wires]:
    """Three sites, with a peer each."""
    needs_images(SERVICE_IMAGE, FAULTS_IMAGE)
    async with running_link(*SITES) as link:
        stations = {site: await link.station(site, tmp_path_factory.mktemp(site)) for site in SITES}
        for station in stations.values():
            await station.launch("python", "-S", "-E", "-m", wire.__name__, "serve")
            await until(lambda station=station: accepts(f"{station.ip}:{wire.PORT}"), 10, "the peer serves")
        yield Wires(link, stations)


@pytest_asyncio.fixture(loop_scope="module")
async def wires(every_wire: Wires) -> AsyncIterator[Wires]:
    """The sites with a healthy link."""
    yield every_wire
    await every_wire.link.heal()


async def test_a_round_trip_takes_the_delays_of_both_directions(wires: Wires) -> None:
    """A delay is seen between its two sites only, once in a round trip if it is directed and else twice."""
    assert await wires.rtt_s("eu", "us") < NEAR_S
    await wires.link.slow("eu", "us", 0.08)
    assert 0.16 <= await wires.rtt_s("eu", "us") < 0.16 + NEAR_S
    assert 0.16 <= await wires.rtt_s("us", "eu") < 0.16 + NEAR_S
    assert await wires.rtt_s("eu", "ap") < NEAR_S
    await wires.link.slow("us", "eu", 0.0, is_directed=True)
    assert 0.08 <= await wires.rtt_s("eu", "us") < 0.08 + NEAR_S
    await wires.link.heal()
    assert await wires.rtt_s("eu", "us") < NEAR_S


async def test_a_directed_cut_loses_the_packets_of_one_direction(wires: Wires) -> None:
    """Datagrams pass one way only, and connections cannot be opened in either; the third site notices nothing."""
    await wires.link.cut("eu", "us", is_directed=True)
    assert await wires.arrived("eu", "us", 50) == 0
    assert await wires.arrived("us", "eu", 50) == 50
    assert not await wires.connects("eu", "us") and not await wires.connects("us", "eu")
    assert await wires.connects("ap", "us") and await wires.connects("eu", "ap")
    await wires.link.heal("eu", "us")
    assert await wires.arrived("eu", "us", 50) == 50


async def test_a_connection_outlives_a_cut(wires: Wires) -> None:
    """A cut resets no connection: its bytes arrive after the healing."""
    await wires.link.slow("eu", "us", 0.03)
    seen = await wires.seen("eu", "us")
    staying = asyncio.create_task(wires.longest_s("eu", "us"))

    async def is_open() -> bool:
        return await wires.seen("eu", "us") > seen

    await until(is_open, 10, "the connection is open", every_s=0.02)
    await wires.link.cut("eu", "us")
    assert not await wires.connects("us", "eu")
    assert not staying.done()
    await wires.link.heal()
    assert await staying >= CONNECT_S_MAX


async def test_a_slow_path_is_no_narrow_one(wires: Wires) -> None:
    """4 MB pass a path with a delay of 30 ms, and come back, in a few round trips."""
    await wires.link.slow("eu", "us", 0.03)
    assert await wires.bulk_s("eu", "us") < 5


async def test_an_isolated_site_is_cut_off_from_all_others(wires: Wires) -> None:
    """An isolated site reaches no other one and is reached by this machine alone."""
    await wires.link.isolate("eu")
    assert not await wires.connects("eu", "us") and not await wires.connects("ap", "eu")
    assert await wires.connects("us", "ap")
    assert await accepts(f"{wires.stations['eu'].ip}:{wire.PORT}")


@pytest.mark.parametrize("delay_s", [0.0, 0.01])
async def test_a_share_of_the_packets_is_lost(wires: Wires, delay_s: float) -> None:
    """Half of 200 datagrams are lost, within six standard deviations, with a delay and without.

    More of them at once could overflow the receiver's buffer.
    """
    await wires.link.slow("eu", "us", delay_s, 0.5, is_directed=True)
    assert 58 <= await wires.arrived("eu", "us", 200) <= 142
    assert await wires.arrived("us", "eu", 50) == 50


async def test_no_site_reaches_another_without_the_link(
    needs_images: Callable[..., None], tmp_path: Path
) -> None:
    """Before its start no packet passes between the sites, and after its stop nothing is left."""
    needs_images(SERVICE_IMAGE, FAULTS_IMAGE)
    link = Link(("eu", "us"))
    try:
        stations = {site: await link.station(site, tmp_path / site) for site in ("eu", "us")}
        without = Wires(link, stations)
        await stations["us"].launch("python", "-S", "-E", "-m", wire.__name__, "serve")
        await until(lambda: accepts(f"{stations['us'].ip}:{wire.PORT}"), 10, "the peer serves")
        assert not await without.connects("eu", "us")
        await link.start()
        # The first try may wait for an answer that the failed one asked for in vain.
        await until(lambda: without.connects("eu", "us"), 20, "the link routes")
    finally:
        await link.stop()
    with daemon.connected() as client:
        assert ownership.left_of(client, link.run) == []
