"""Store of the operator's overrides in Redis, followed by every frontend. `overrides.read` decides which are in force.

`{mesh}:tenants` is a hash with one entry per table ("tenant:search" -> Override as JSON). `{mesh}:tenants-news` is a
pub/sub channel that announces changes, for a hot reload. While Redis is unavailable, the overrides known last stay in
force. Every frontend restores overrides that Redis has lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from kvmesh.config import MeshConfig
from kvmesh.redis_link import RedisLink, RedisUnavailable, key
from kvmesh.redis_script import Script
from kvmesh.region_sections import shares_of
from kvmesh.tasks import persist
from kvmesh.tenants.catalogue import Catalogue
from kvmesh.tenants.overrides import Override, read

log = logging.getLogger(__name__)

_REPLACE: Final = Script.beside(__file__, "replace_override.lua")
_RESTORE: Final = Script.beside(__file__, "restore_override.lua")

POLL_S: Final = 1.0
"""Poll interval without an announced change."""

RETRY_PAUSE_S: Final = 0.25

CAS_ATTEMPTS_MAX: Final = 5
"""Attempts of one change by compare-and-set (optimistic concurrency)."""


class CatalogueStore:
    """Keeps `catalogue` up to date. Owned by the caller of `run`."""

    def __init__(self, redis: RedisLink, config: MeshConfig) -> None:
        self._share = self._wanted_share = _configured_share(config)
        """Share of all limits in `catalogue`, and the share that it should have."""
        self.catalogue = Catalogue(config, share=self._share)
        """Replaced as a whole, so that one read gives a consistent state of all tenants."""
        self._redis = redis
        self._config = config
        self._overrides: Mapping[str, Override] = {}
        self._entries: Mapping[bytes, bytes] = {}
        self._missing: Mapping[str, Override] = {}
        """Overrides that Redis lacked at the last read."""
        self._logged_problems: Sequence[str] = ()

    def set_share(self, share: float) -> None:
        """Enforce `share` of all limits from the next poll on. 0: the configured share."""
        self._wanted_share = share or _configured_share(self._config)

    async def start(self) -> None:
        """Poll once before the first request. If Redis is unavailable, the configuration alone counts."""
        with suppress(RedisUnavailable):
            await self.poll()

    async def run(self) -> None:
        """Poll every POLL_S and after every announced change, until cancelled. No answer of Redis ends the loop."""
        if self.catalogue.requires_credentials:  # without tenants there is nothing to change
            await persist(self._follow, "tenants", pause_s=RETRY_PAUSE_S)

    async def poll(self) -> None:
        """Read the overrides once and apply changes. Raises RedisUnavailable."""
        if not self.catalogue.requires_credentials:
            return
        found = await _read(self._redis, self._config.mesh.name)
        share = self._wanted_share
        if found == self._entries and not self._missing and share == self._share:
            return
        overrides, missing, problems = read(found, self._overrides)
        if overrides != self._overrides or share != self._share:
            changed = sorted(
                scope for scope, override in overrides.items() if override != self._overrides.get(scope)
            )
            # Building 3,000 tenants takes 0.1 s of CPU (measured once, by hand), so a thread does it and no stream waits.
            self.catalogue = await asyncio.to_thread(Catalogue, self._config, overrides, share)
            self._overrides, self._share = overrides, share
            log.info("tenants changed", extra={"changed": changed, "limit_share": share})
        self._entries = found
        self._log_problems([*problems, *self.catalogue.problems])
        if missing and missing != self._missing:
            log.warning("Redis lost overrides of tenants; restoring them", extra={"changed": sorted(missing)})
        self._missing = missing
        if missing:
            with suppress(RedisUnavailable):  # a Redis that refuses writes can still be read
                await restore(self._redis, self._config.mesh.name, missing)

    async def _follow(self) -> None:
        subscription = self._redis.subscription()
        try:
            await self._redis.guarded(subscription.subscribe(key(self._config.mesh.name, "tenants-news")))
            while True:
                await self.poll()
                await self._redis.guarded(subscription.get_message(timeout=POLL_S))
        finally:
            with suppress(Exception):  # errors of closing a broken connection do not matter
                await subscription.aclose()

    def _log_problems(self, problems: Sequence[str]) -> None:
        for problem in problems:
            if problem not in self._logged_problems:
                log.error("an override of tenants is left out: %s", problem)
        self._logged_problems = problems


def _configured_share(config: MeshConfig) -> float:
    """Return the configured share of the own region; 1 in a mesh without regions."""
    return shares_of(config.regions)[config.region.name] if config.regions else 1.0


async def read_overrides(redis: RedisLink, mesh: str) -> tuple[dict[str, Override], list[str]]:
    """Return the overrides in Redis, and one sentence for each unreadable entry. Raises RedisUnavailable."""
    overrides, _, problems = read(await _read(redis, mesh), {})
    return overrides, problems


async def change(
    redis: RedisLink, mesh: str, scope: str, made: Callable[[dict[str, Any]], dict[str, Any]]
) -> Override:
    """Replace the changes of the entry of `scope` by `made(changes)`, with compare-and-set; return the written override.

    No concurrent change is lost: after a conflict `made` is called again with the other writer's changes. An unreadable
    entry counts as empty. Raises RedisUnavailable, Contended, and the errors of `made`.
    """
    name = key(mesh, "tenants")
    for _ in range(CAS_ATTEMPTS_MAX):
        before = await redis.execute("HGET", name, scope)
        known = read({scope.encode(): before}, {})[0].get(scope) if before is not None else None
        changes = made(dict(known.changes) if known else {})
        version = await redis.execute(
            *("EVAL", _REPLACE.text, 1, name, scope, msgspec.json.encode(changes), key(mesh, "tenants-news")),
            *(before or b"", known.version + 1 if known else 1),
        )
        if version:
            return Override(version=int(version), changes=changes)
    raise Contended(f"{scope} was changed by others at the same time: nothing was written; try again.")


class Contended(Exception):
    """Concurrent changes of the same entry won every attempt; the text is one sentence."""


async def restore(redis: RedisLink, mesh: str, overrides: Mapping[str, Override]) -> None:
    """Write those of `overrides` that are missing or older in Redis. Raises RedisUnavailable."""
    name, news = key(mesh, "tenants"), key(mesh, "tenants-news")
    await redis.pipeline(
        [
            ("EVAL", _RESTORE.text, 1, name, scope, msgspec.json.encode(override), news, override.version)
            for scope, override in overrides.items()
        ]
    )


async def _read(redis: RedisLink, mesh: str) -> dict[bytes, bytes]:
    """Return all entries of the hash. Raises RedisUnavailable."""

    found = await redis.execute("HGETALL", key(mesh, "tenants"))
    if isinstance(found, Mapping):
        return dict(found)
    return dict(zip(found[::2], found[1::2], strict=True))
