"""Regions of the client with scripted frontends: refusals, the home region in each call, regions without an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from kvmesh.client import Client, MeshFull, MeshUnavailable, RequestRefused, RetryPolicy
from kvmesh.errors import MeshError
from kvmesh.inference.v1 import inference_pb2 as pb
from tests.integration.client.scripted_frontend import IDS, Script, ScriptedFrontend, begin, scripted, well
from tests.integration.client.test_silence import cabled
from tests.integration.harness import until
from tests.patience import patience, quiet_s

RETRY_POLICY = RetryPolicy(
    probe_after_s=0.4, probe_timeout_s=0.8, sends_max=6, rest_min_s=1.0, rest_max_s=4.0
)
"""Shorter than the defaults."""


def refuses(error: MeshError, after: int = 0) -> Script:
    """Return a script that ends each request with `error`, behind `after` tokens."""

    async def script(request: pb.GenerateRequest, frontend: ScriptedFrontend, context: Any) -> None:
        if after and not request.options.HasField("resume"):
            await begin(request, context, after)
        raise error

    return script


FULL = MeshError("LIVE_REQUESTS_FULL", "full", retry_after_s=0.05)
UNAVAILABLE = MeshError("REGION_UNAVAILABLE", "not now", retry_after_s=0.05)
PINNED = MeshError("REGION_UNAVAILABLE", "not now", {"regions": "eu"}, retry_after_s=0.05)
STALE = MeshError("STALE_SNAPSHOT", "gone", retry_after_s=0.01)
DRAINING = MeshError("DRAINING", "going down", retry_after_s=0.05)


@dataclass
class Two:
    """Two frontends in each of two regions, and a client with home in `eu`."""

    eu: list[ScriptedFrontend]
    us: list[ScriptedFrontend]
    client: Client

    def say(self, region: list[ScriptedFrontend], script: Script) -> None:
        """Let all frontends of the region follow `script`."""
        for each in region:
            each.script = script

    def counts(self) -> tuple[int, int]:
        """Return the requests that each region has received."""
        return sum(len(each.requests) for each in self.eu), sum(len(each.requests) for each in self.us)


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    """Two regions that serve."""
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(scripted(well)) for _ in range(4)]
        regions = {"us": [each.address for each in made[2:]], "eu": [each.address for each in made[:2]]}
        client = await stack.enter_async_context(
            Client(regions=regions, prefer="eu", retry_policy=RETRY_POLICY)
        )
        yield Two(made[:2], made[2:], client)


async def test_each_call_names_the_home_region(two: Two) -> None:
    """Also a call in another region; a client without regions sends no name."""
    await two.client.generate("x").all()
    two.say(two.eu, refuses(UNAVAILABLE))
    await two.client.generate("x").all()
    assert two.counts() == (2, 1)
    seen = [each for frontend in (*two.eu, *two.us) for each in frontend.metadata]
    assert [each["kvmesh-region"] for each in seen] == ["eu"] * 3
    async with Client([two.us[0].address]) as plain:
        await plain.generate("x").all()
    assert "kvmesh-region" not in two.us[0].metadata[-1]


async def test_full_frontends_stay_home(two: Two) -> None:
    """One full frontend: the other one serves. Both full: the request fails as full, and the other region gets nothing."""
    two.eu[0].script = refuses(FULL)
    for _ in range(10):
        assert (await two.client.generate("x").all()).ids == IDS
    two.say(two.eu, refuses(FULL))
    with pytest.raises(MeshFull):
        await two.client.generate("x").all()
    two.say(two.eu, well)
    assert (await two.client.generate("x").all()).ids == IDS
    assert two.counts()[1] == 0


async def test_a_request_that_grpc_refuses_does_not_cost_the_home_region(two: Two) -> None:
    """A message that is too large for every frontend ends its own request; later ones are served at home."""

    async def too_large(request: pb.GenerateRequest, frontend: ScriptedFrontend, context: Any) -> None:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max")

    two.say(two.eu, too_large)
    two.say(two.us, too_large)
    with pytest.raises(RequestRefused, match="MESSAGE_TOO_LARGE"):
        await two.client.generate("x").all()
    two.say(two.eu, well)
    assert (await two.client.generate("x").all()).ids == IDS
    assert two.counts()[1] == 0


async def test_a_region_that_cannot_serve_a_request_loses_this_request_only(two: Two) -> None:
    """The next request starts at home again. A pinned tenant gets the refusal itself."""
    two.say(two.eu, refuses(UNAVAILABLE))
    answer = await two.client.generate("x").all()
    assert (answer.ids, answer.sends, two.counts()) == (IDS, 2, (1, 1))
    two.say(two.eu, refuses(PINNED))
    with pytest.raises(MeshUnavailable) as caught:
        await two.client.generate("x").all()
    assert caught.value.reason == "REGION_UNAVAILABLE" and two.counts() == (2, 1)


async def test_a_version_that_home_lost_is_looked_for_in_the_other_region(two: Two) -> None:
    """The stream goes on behind its tokens; it ends with them where both regions refuse."""
    two.say(two.eu, refuses(STALE, after=4))
    answer = await two.client.generate("x").all()
    assert (answer.ids, answer.resumes, two.counts()) == (IDS, 1, (1, 1))
    two.say(two.us, refuses(STALE))
    with pytest.raises(MeshUnavailable) as ended:
        await two.client.generate("x").all()
    assert (ended.value.reason, ended.value.ids) == ("STALE_SNAPSHOT", IDS[:4])
    assert ended.value.resume is not None


async def test_a_region_that_drains_is_left_until_it_serves_again(two: Two) -> None:
    """DRAINING from all frontends of home; its health stays answered. Streams go home after the rest."""
    two.say(two.eu, refuses(DRAINING, after=4))
    for each in two.eu:
        each.is_draining = True
    answer = await two.client.generate("x").all()
    assert answer.ids == IDS and two.counts() == (2, 1)
    loop, asked = asyncio.get_running_loop(), two.counts()[0]
    until_s = loop.time() + 2.5
    while loop.time() < until_s:
        await two.client.generate("x").all()
    assert two.counts()[0] == asked and sum(each.checks for each in two.eu) > 2
    two.say(two.eu, well)
    for each in two.eu:
        each.is_draining = False
    back_s = loop.time()
    async with patience(20):
        while two.counts()[0] == asked:
            await two.client.generate("x").all()
    assert loop.time() - back_s >= RETRY_POLICY.rest_min_s


async def test_a_region_that_drops_all_packets_is_left_after_one_timeout() -> None:
    """Five frontends without an answer cost a request hardly more than one: the others are probed at the first loss."""
    async with AsyncExitStack() as stack:
        eu = [await stack.enter_async_context(scripted(well)) for _ in range(5)]
        us = await stack.enter_async_context(scripted(well))
        cables = [await stack.enter_async_context(cabled(each)) for each in eu]
        regions = {"eu": [each.address for each in cables], "us": [us.address]}
        client = await stack.enter_async_context(
            Client(regions=regions, prefer="eu", retry_policy=RETRY_POLICY)
        )

        async def all_are_connected() -> bool:
            await asyncio.gather(*(client.generate("x").all() for _ in range(5)))
            return all(each.requests for each in eu)

        await until(all_are_connected, 10, "each frontend has had a request")
        for cable in cables:
            cable.is_cut = True
        began_s = quiet_s()
        answer = await client.generate("x", deadline_s=30).all()
        assert answer.ids == IDS and len(us.requests) == 1
        assert answer.sends <= 4 and quiet_s() - began_s < 5
        began_s = quiet_s()
        for _ in range(20):
            await client.generate("x").all()
        assert quiet_s() - began_s < 1 and len(us.requests) == 21
