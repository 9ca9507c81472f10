"""Name leases that another mesh holds in a shared Redis, checked before `kvmesh up` starts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import redis.asyncio

from kvmesh.cli.readiness import POLL_S
from kvmesh.membership.member import LEASE_S
from kvmesh.redis_link import TIMEOUT_S, key
from kvmesh.redis_sentinel import sentinel_client
from kvmesh.redis_sentinel_url import is_sentinel

LEASES_END_S: Final = LEASE_S + 0.5
"""Name leases of a mesh that was just killed expire within this time."""


async def leased_names(
    url: str, mesh: str, names: Sequence[str], within_s: float = LEASES_END_S
) -> list[str]:
    """Return those of `names` that still have a lease in the Redis at `url` after `within_s`; at once if none has."""
    client = (
        sentinel_client(url, timeout_s=TIMEOUT_S, connections_max=1)
        if is_sentinel(url)
        else redis.asyncio.Redis.from_url(url)
    )
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
