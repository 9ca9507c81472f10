"""Keeps a process's lease in Redis. A shell."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

import msgspec

from kvmesh.membership.member import FAREWELL, LEASE_S, RENEW_S, Member, boot_of
from kvmesh.redis_link import RedisAway, RedisLink, key
from kvmesh.tasks import persist

log = logging.getLogger(__name__)

AWAY_PAUSE_S = 0.25


class Registration:
    """Keeps one member's lease. Owned by who calls `run`; call `deregister` at a clean shutdown, after `run` ended.

    Of two processes with one name the one that started later has the lease: the first write of a process takes it from
    whoever holds it, every later one only from that same holder. The older one stops.
    """

    def __init__(self, redis: RedisLink, mesh: str, member: Member) -> None:
        self.member = member
        self.is_superseded = False
        """True once a newer process has taken the name."""
        self.is_refused = False
        """True while the lease cannot be written; then those of others cannot, either."""
        self._redis = redis
        self._mesh = mesh
        self._changed = asyncio.Event()
        self._has_claimed = False
        self._predecessor = ""
        """Boot id of the process the name was taken from; after a flush it may be the first to write again."""

    def update(self, **changes: Any) -> None:
        """Change fields of the member (`draining=True`); written at once if `run` runs."""
        member = msgspec.structs.replace(self.member, **changes)
        if member != self.member:
            self.member = member
            self._changed.set()

    async def run(self) -> None:
        """Renew the lease until cancelled. No answer of Redis ends it."""
        await persist(self._keep, "registration", pause_s=AWAY_PAUSE_S, on_failure=self._on_failure)

    async def _keep(self) -> None:
        announce = True
        while not self.is_superseded:
            self._changed.clear()
            await self._write(announce)
            self.is_refused = False
            announce = False
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await self._changed.wait()
                announce = True
        await asyncio.Event().wait()

    def _on_failure(self) -> None:
        self.is_refused = True

    async def deregister(self) -> None:
        """Give the lease back, unless a newer process of the same name holds it. Never raises RedisAway."""
        with suppress(RedisAway):
            await self._redis.execute(
                "EVAL",
                _DEREGISTER,
                2,
                key(self._mesh, "proc", self.member.process_id),
                key(self._mesh, "procs"),
                msgspec.json.encode(self.member.boot_id),
                self.member.process_id,
                key(self._mesh, "proc-news"),
                FAREWELL + self.member.boot_id.encode(),
            )

    async def _write(self, announce: bool) -> None:
        member = self.member
        holder = await self._redis.execute(
            "EVAL",
            _RENEW,
            2,
            key(self._mesh, "proc", member.process_id),
            key(self._mesh, "procs"),
            msgspec.json.encode(member),
            int(LEASE_S * 1000),
            member.process_id,
            key(self._mesh, "proc-news"),
            b"announce" if announce else b"",
            b"renew" if self._has_claimed else b"claim",
            *(msgspec.json.encode(boot_id) for boot_id in (member.boot_id, self._predecessor) if boot_id),
        )
        other = boot_of(holder)
        if other in ("", member.boot_id):
            pass
        elif not self._has_claimed:
            self._predecessor = other
        elif other != self._predecessor:
            self.is_superseded = True
            log.error(
                "%s was started again as boot %s while this one, %s, runs: nobody finds this one any more",
                *(member.process_id, other, member.boot_id),
            )
        self._has_claimed = True


_RENEW = """
local lease = redis.call('GET', KEYS[1])
if lease and ARGV[6] == 'renew' then
  local may = false
  for at = 7, #ARGV do
    may = may or string.find(lease, ARGV[at], 1, true)
  end
  if not may then return lease end
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('SADD', KEYS[2], ARGV[3])
if not lease or ARGV[5] ~= '' then
  redis.call('PUBLISH', ARGV[4], ARGV[3])
end
return lease
"""
"""KEYS: lease, names. ARGV: new lease, its life in ms, name, channel, "announce" or nothing, "claim" or "renew", boot ids
it may replace. A lease that comes back after it had expired is announced too: whoever stood still or was cut off is found
again at once. Returns the lease that was there; in a renewal with a foreign boot id nothing was written."""

_DEREGISTER = """
local lease = redis.call('GET', KEYS[1])
if lease and string.find(lease, ARGV[1], 1, true) then
  redis.call('DEL', KEYS[1])
  redis.call('SREM', KEYS[2], ARGV[2])
  redis.call('PUBLISH', ARGV[3], ARGV[4])
end
return 0
"""
