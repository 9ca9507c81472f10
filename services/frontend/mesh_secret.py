"""The mesh's secret in Redis: all frontends sign with it, so that each accepts the resume tokens of every other.

Effects only; `resume_token.Seal` signs and verifies (decision 0007). `{mesh}:resume-secret` holds the secret, without
expiry. Every frontend also keeps the secret in memory, and writes it again if Redis has lost it. Tokens therefore stay
valid after Redis has lost its memory.
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
    """Sets `seal` to the mesh's secret, and proposes the secret of `seal` to a mesh without one."""

    def __init__(self, redis: RedisLink, mesh: str, seal: Seal) -> None:
        self._redis = redis
        self._key = key(mesh, "resume-secret")
        self._seal = seal
        self._is_shared = False
        self._has_warned = False

    async def run(self) -> None:
        """Call `renew` every RENEW_S until cancelled."""
        while True:
            await asyncio.sleep(RENEW_S)
            await self.renew()

    async def renew(self) -> None:
        """Take the mesh's secret from Redis; write the secret of `seal` to Redis if Redis has none.

        `seal` is unchanged without Redis, and if the stored secret is invalid. Called before the first token is signed,
        then by `run`.
        """
        try:
            _, found = await self._redis.pipeline(
                [("SET", self._key, self._seal.secret, "NX"), ("GET", self._key)]
            )
        except RedisUnavailable:
            self._warn(
                "Redis is unavailable: resume tokens are valid at this frontend only until Redis answers"
            )
            return
        if not isinstance(found, bytes) or len(found) != SECRET_BYTES:
            self._warn(f"{self._key} holds no valid secret: resume tokens are valid at this frontend only")
            return
        if self._seal.take(found) and self._is_shared:
            log.warning(
                "the secret of the mesh changed: older resume tokens are valid only at frontends that had the older secret"
            )
        self._is_shared = True

    def _warn(self, what: str) -> None:
        if not self._is_shared and not self._has_warned:
            self._has_warned = True
            log.warning(what)
