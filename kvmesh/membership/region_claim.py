"""The region that a Redis belongs to: `{mesh}:region`, without expiry. Processes of another region refuse to start.

Two regions on one Redis would be one mesh with mixed routers, replicas and budgets. A process without a named region
(`region.name = "local"`) claims nothing and is never refused, so naming the region of a mesh needs no downtime.
"""

from __future__ import annotations

from typing import Final

from kvmesh.redis_link import RedisLink, RedisUnavailable, key
from kvmesh.region_sections import UNNAMED

NAME_BYTES_MAX: Final = 64


class RegionClaim:
    """The claim of one process on its Redis."""

    def __init__(self, redis: RedisLink, mesh: str, region: str) -> None:
        self._redis = redis
        self._key = key(mesh, "region")
        self._region = region
        self._is_confirmed = False

    async def fault(self) -> str:
        """Claim Redis for the region. Return why the process may not use this Redis, or an empty text.

        One round trip at the start and after each `on_failure`, else none: only a Redis that was away may be another
        one, or may have lost the claim. Raises RedisUnavailable.
        """
        if self._is_confirmed or self._region == UNNAMED:
            return ""
        _, found = await self._redis.pipeline([("SET", self._key, self._region, "NX"), ("GET", self._key)])
        owner = found.decode(errors="replace")[:NAME_BYTES_MAX] if isinstance(found, bytes) else ""
        self._is_confirmed = owner == self._region
        if self._is_confirmed:
            return ""
        return (
            f'region.name = "{self._region}" does not match this Redis, which belongs to region "{owner}" ({self._key}): '
            "give the process the Redis of its own region. To rename a region, stop its processes and delete the key."
        )

    async def fault_if_reachable(self) -> str:
        """Return `fault`, or an empty text without Redis: a later claim decides then."""
        try:
            return await self.fault()
        except RedisUnavailable:
            return ""

    def on_failure(self) -> None:
        """Note that Redis failed: the next call of `fault` asks it again."""
        self._is_confirmed = False
