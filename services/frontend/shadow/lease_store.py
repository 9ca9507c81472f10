"""Leases of a shadow's tokens in Redis: one call at a time, never awaited by a request."""

from __future__ import annotations

from typing import Final

from kvmesh.redis_link import RedisLink, RedisUnavailable, key
from kvmesh.redis_script import Script
from kvmesh.snapshot.shadow import Shadow
from services.frontend.shadow.ledger import LeaseAnswer, LeaseRequest

_LEASE: Final = Script.beside(__file__, "lease_tokens.lua")

LIFE_S: Final = 8 * 24 * 3600
"""Life of a ledger behind its last change, longer than that of a shadow's document."""


class LeaseStore:
    """See the module."""

    def __init__(self, redis: RedisLink, mesh: str) -> None:
        self._redis = redis
        self._mesh = mesh

    async def lease(self, shadow: Shadow, request: LeaseRequest) -> LeaseAnswer | None:
        """Return the answer of Redis. None: it did not answer, or answered junk."""
        ledger = key(self._mesh, "shadow", shadow.id, "ledger")
        ceilings = (shadow.token_max, shadow.tokens_per_minute_max)
        arguments = (request.least, request.most, *ceilings, request.returned, 1000 * LIFE_S)
        try:
            (answer,) = await self._redis.scripts(_LEASE, [((ledger,), arguments)])
            granted, total, is_minute = (int(each) for each in answer)
        except (RedisUnavailable, TypeError, ValueError):
            return None
        return LeaseAnswer(granted, total, is_minute=bool(is_minute))
