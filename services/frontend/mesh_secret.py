"""The mesh's secret in Redis: all frontends sign with it, so that each accepts the resume tokens of every other.

Effects only; `resume_token.Seal` signs and verifies (decision 0007). `{mesh}:resume-secret` holds the secret, without
expiry. Every frontend also keeps the secret in memory, and writes it again if Redis has lost it. Tokens therefore stay
valid after Redis has lost its memory.

`{mesh}:resume-secret:{region}` holds the secrets of another region, the present one first. The leader of the control plane
writes it. Tokens of that region are accepted, and nothing is signed with its secrets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Final

from kvmesh.redis_link import RedisLink, RedisUnavailable, key
from services.frontend.requests.resume_token import SECRET_BYTES, Seal

log = logging.getLogger(__name__)

RENEW_S: Final = 1.0

SECRETS_MAX: Final = 2
"""Secrets of another region: the present one and the one before."""


class MeshSecret:
    """Sets `seal` to the mesh's secret, and proposes the secret of `seal` to a mesh without one.

    `others`: the other regions, whose secrets `seal` shall know.
    """

    def __init__(self, redis: RedisLink, mesh: str, seal: Seal, others: Collection[str] = ()) -> None:
        self._redis = redis
        self._others = {region: key(mesh, f"resume-secret:{region}") for region in sorted(others)}
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
            _, found, *others = await self._redis.pipeline(
                [
                    ("SET", self._key, self._seal.secret, "NX"),
                    ("GET", self._key),
                    *(("GET", name) for name in self._others.values()),
                ]
            )
        except RedisUnavailable:
            self._warn(
                "Redis is unavailable: resume tokens are valid at this frontend only until Redis answers"
            )
            return
        for region, secrets in zip(self._others, others, strict=True):
            self._know(region, secrets)
        if not isinstance(found, bytes) or len(found) != SECRET_BYTES:
            self._warn(f"{self._key} holds no valid secret: resume tokens are valid at this frontend only")
            return
        if self._seal.take(found) and self._is_shared:
            log.warning(
                "the secret of the mesh changed: older resume tokens are valid only at frontends that had the older secret"
            )
        self._is_shared = True

    def _know(self, region: str, found: object) -> None:
        """Take the secrets of another region. An absent or invalid value leaves the known ones: Redis may lose it."""
        if isinstance(found, bytes) and len(found) in range(
            SECRET_BYTES, SECRETS_MAX * SECRET_BYTES + 1, SECRET_BYTES
        ):
            self._seal.know(
                region, tuple(found[at : at + SECRET_BYTES] for at in range(0, len(found), SECRET_BYTES))
            )

    def _warn(self, what: str) -> None:
        if not self._is_shared and not self._has_warned:
            self._has_warned = True
            log.warning(what)
