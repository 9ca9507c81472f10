"""A Redis belongs to one region: leases of another region are never written."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvmesh.config import ConfigError
from kvmesh.membership.membership import read_members
from kvmesh.membership.region_claim import RegionClaim
from kvmesh.membership.registration import Registration
from kvmesh.redis_link import RedisLink
from kvmesh.region_sections import UNNAMED
from kvmesh.tasks import end
from tests.integration.control.control_process import control
from tests.integration.regions import two_regions
from tests.integration.router.test_membership import member, until
from tests.one_redis import ONE_REDIS

pytestmark = ONE_REDIS


async def test_the_first_named_region_owns_redis_and_others_are_told_both_names(redis_server: Any) -> None:
    """A region without a name neither claims nor is refused, so a region can be named without downtime."""
    link = RedisLink(redis_server.url)
    assert await RegionClaim(link, "m", UNNAMED).fault() == ""
    assert await RegionClaim(link, "m", "eu").fault() == ""
    assert await RegionClaim(link, "m", UNNAMED).fault() == ""
    fault = await RegionClaim(link, "m", "us").fault()
    assert 'region.name = "us"' in fault and 'belongs to region "eu"' in fault and "m:region" in fault
    assert await RegionClaim(link, "other", "us").fault() == ""
    await link.close()


async def test_a_process_that_meets_the_redis_of_another_region_later_stands_by(redis_server: Any) -> None:
    """Redis is exchanged while the process runs: no lease is written, and the reason is reported once."""
    link = RedisLink(redis_server.url)
    reasons: list[str] = []

    async def on_name_state(reason: str) -> None:
        reasons.append(reason)

    claim = RegionClaim(link, "m", "us")
    registration = Registration(link, "m", member("a"), on_name_state, claim=claim)
    running = asyncio.create_task(registration.run())
    await until(lambda: registration.is_holder)
    await link.execute("FLUSHALL")
    await link.execute("SET", "m:region", "eu")
    claim.on_failure()  # the connection to the former Redis broke
    await until(lambda: registration.is_refused and any("eu" in reason for reason in reasons))
    assert await read_members(link, "m") == []
    await link.execute("DEL", "m:region")
    await until(lambda: reasons[-1] == "")
    assert [each.process_id for each in await read_members(link, "m")] == ["a"]
    assert len(reasons) == 3, reasons
    await end([running])
    await link.close()


async def test_a_control_process_of_another_region_refuses_to_start(redis_server: Any) -> None:
    """Two control planes on one Redis would lead one mesh in turn."""
    link = RedisLink(redis_server.url)
    await link.execute("SET", "kvmesh:region", "us")
    with pytest.raises(ConfigError, match=r'region\.name = "eu".*belongs to region "us"'):
        async with control(redis_server.url, config=two_regions("eu")):
            pass
    await link.close()
