"""Whether another mesh has the names that `kvmesh up` is about to use, in a Redis that both share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import redis.asyncio

from kvmesh.cli.readiness import POLL_S
from kvmesh.membership.member import LEASE_S
from kvmesh.redis_link import key

LEASES_END_S: Final = LEASE_S + 0.5
"""The leases of a mesh that was killed a moment ago run out within this time."""


async def leased_names(
    url: str, mesh: str, names: Sequence[str], within_s: float = LEASES_END_S
) -> list[str]:
    """Return which of `names` still have a lease in the Redis at `url` after `within_s`, or at once that none has."""
    client = redis.asyncio.Redis.from_url(url)
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + within_s
    try:
        while True:
            held = [name for name in names if await client.exists(key(mesh, "proc", name)) == 1]
            if not held or loop.time() > give_up_s:
                return held
            await asyncio.sleep(POLL_S)
    finally:
        await client.aclose()
