"""What operators changed, kept in Redis and followed by every frontend. A shell.

`{mesh}:tenants` is a hash with one entry a table ("tenant:search" -> Override as JSON); `{mesh}:tenants-news` is a channel
that says "look again". While Redis is away, what was known last holds; what Redis lost, every frontend puts back.
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
from kvmesh.tasks import persist
from kvmesh.tenants.catalogue import Catalogue
from kvmesh.tenants.overrides import Override, read

log = logging.getLogger(__name__)

_REPLACE: Final = Script.beside(__file__, "replace_override.lua")
_RESTORE: Final = Script.beside(__file__, "restore_override.lua")

POLL_S: Final = 1.0
"""Between two looks without news."""

RETRY_PAUSE_S: Final = 0.25

CAS_ATTEMPTS_MAX: Final = 5
"""Of a change that others come before."""


class CatalogueStore:
    """Keeps `catalogue` up to date. Owned by who calls `run`."""

    def __init__(self, redis: RedisLink, config: MeshConfig) -> None:
        self.catalogue = Catalogue(config)
        """Swapped as a whole: whoever reads it once sees one state of all tenants."""
        self._redis = redis
        self._config = config
        self._overrides: Mapping[str, Override] = {}
        self._entries: Mapping[bytes, bytes] = {}
        self._missing: Mapping[str, Override] = {}
        """What Redis had lost when it was read last."""
        self._logged_problems: Sequence[str] = ()

    async def start(self) -> None:
        """Look once, before the first request; where Redis is away, what the configuration says holds."""
        with suppress(RedisUnavailable):
            await self.poll()

    async def run(self) -> None:
        """Look every POLL_S and at every nudge, until cancelled. No answer of Redis ends it."""
        if self.catalogue.requires_credentials:  # without tenants there is nothing that could be changed
            await persist(self._follow, "tenants", pause_s=RETRY_PAUSE_S)

    async def poll(self) -> None:
        """Look once. Raises RedisAway."""
        if not self.catalogue.requires_credentials:
            return
        found = await _read(self._redis, self._config.mesh.name)
        if found == self._entries and not self._missing:
            return
        overrides, missing, problems = read(found, self._overrides)
        if overrides != self._overrides:
            changed = sorted(
                scope for scope, override in overrides.items() if override != self._overrides.get(scope)
            )
            # Some thousand tenants take a tenth of a second to build: no stream waits for that.
            self.catalogue = await asyncio.to_thread(Catalogue, self._config, overrides)
            self._overrides = overrides
            log.info("tenants changed", extra={"changed": changed})
        self._entries = found
        self._log_problems([*problems, *self.catalogue.problems])
        if missing and missing != self._missing:
            log.warning("Redis lost what was changed; it is put back", extra={"changed": sorted(missing)})
        self._missing = missing
        if missing:
            with suppress(RedisUnavailable):  # one that takes no writes can be read all the same
                await restore(self._redis, self._config.mesh.name, missing)

    async def _follow(self) -> None:
        subscription = self._redis.subscription()
        try:
            await self._redis.guarded(subscription.subscribe(key(self._config.mesh.name, "tenants-news")))
            while True:
                await self.poll()
                await self._redis.guarded(subscription.get_message(timeout=POLL_S))
        finally:
            with suppress(Exception):  # closing a broken connection tells nothing new
                await subscription.aclose()

    def _log_problems(self, problems: Sequence[str]) -> None:
        for problem in problems:
            if problem not in self._logged_problems:
                log.error("a change of tenants is left out: %s", problem)
        self._logged_problems = problems


async def read_overrides(redis: RedisLink, mesh: str) -> tuple[dict[str, Override], list[str]]:
    """Return what Redis has, and a sentence for each entry that cannot be read. Raises RedisAway."""
    overrides, _, problems = read(await _read(redis, mesh), {})
    return overrides, problems


async def change(
    redis: RedisLink, mesh: str, scope: str, made: Callable[[dict[str, Any]], dict[str, Any]]
) -> Override:
    """Replace the entry of `scope` by what `made` makes of its changes; return what was written.

    Nobody else's change is lost: where somebody comes before, `made` is asked again with what that one wrote. An entry that
    cannot be read counts as empty. Raises RedisAway, Contended, and what `made` raises.
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
    raise Contended(f"{scope} is changed by others all the time: nothing was written, try again.")


class Contended(Exception):
    """Others changed the same entry at the same time; the text is one sentence."""


async def restore(redis: RedisLink, mesh: str, overrides: Mapping[str, Override]) -> None:
    """Write `overrides` where Redis has none or older ones. Raises RedisAway."""
    name, news = key(mesh, "tenants"), key(mesh, "tenants-news")
    await redis.pipeline(
        [
            ("EVAL", _RESTORE.text, 1, name, scope, msgspec.json.encode(override), news, override.version)
            for scope, override in overrides.items()
        ]
    )


async def _read(redis: RedisLink, mesh: str) -> dict[bytes, bytes]:
    """Return the hash as it is. Raises RedisAway."""
    found = await redis.execute("HGETALL", key(mesh, "tenants"))
    if isinstance(found, Mapping):
        return dict(found)
    return dict(zip(found[::2], found[1::2], strict=True))
