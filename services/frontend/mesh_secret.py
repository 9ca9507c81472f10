"""The mesh's secret in Redis: one that all frontends sign with, so that each takes the resume tokens of every other.

A shell. `{mesh}:resume-secret` holds it, without expiry. Every frontend has it in memory, too, and writes it again when
Redis came back empty: tokens outlive Redis.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvmesh.redis_link import RedisLink, RedisUnavailable, key
from services.frontend.requests.resume_token import SECRET_BYTES, Seal

log = logging.getLogger(__name__)

RENEW_S: Final = 1.0


class MeshSecret:
    """Keeps `seal` at the mesh's secret; what it came with is proposed as the mesh's. Owned by who calls `run`."""

    def __init__(self, redis: RedisLink, mesh: str, seal: Seal) -> None:
        self._redis = redis
        self._key = key(mesh, "resume-secret")
        self._seal = seal
        self._is_shared = False
        self._has_warned = False

    async def run(self) -> None:
        """Look every RENEW_S until cancelled."""
        while True:
            await asyncio.sleep(RENEW_S)
            await self.renew()

    async def renew(self) -> None:
        """Take the mesh's secret from Redis, or give it the one from memory. Called before the first token is signed."""
        try:
            _, found = await self._redis.pipeline(
                [("SET", self._key, self._seal.secret, "NX"), ("GET", self._key)]
            )
        except RedisUnavailable:
            self._warn("resume tokens hold at this frontend only until Redis is there")
            return
        if not isinstance(found, bytes) or len(found) != SECRET_BYTES:
            self._warn(f"{self._key} holds no secret: resume tokens hold at this frontend only")
            return
        if self._seal.take(found) and self._is_shared:
            log.warning("the mesh has another secret: older resume tokens hold where they were made")
        self._is_shared = True

    def _warn(self, what: str) -> None:
        if not self._is_shared and not self._has_warned:
            self._has_warned = True
            log.warning(what)
