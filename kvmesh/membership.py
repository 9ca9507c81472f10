"""Who is in the mesh: every process holds a lease in Redis, every process keeps a view of all leases.

`{mesh}:proc:<id>` holds a Member as JSON and expires after LEASE_S; `{mesh}:procs` is the set of ids; `{mesh}:proc-news`
is a channel that says "look again". While Redis is away the last view stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Literal

import msgspec

from kvmesh.clock import Clock, MonotonicClock
from kvmesh.redis_link import RedisAway, RedisLink, key
from kvmesh.tasks import persist

log = logging.getLogger(__name__)

LEASE_S = 3.0
RENEW_S = 1.0
POLL_S = 1.0
MISSING_S = 1.5 * RENEW_S
"""A lease that is missing this long was not renewed: after a flush of Redis every live process has written it again."""

AWAY_PAUSE_S = 0.25
FAREWELL = b"gone:"
"""News that begin with this and a boot id: that process gave its lease back."""

Role = Literal["frontend", "router", "prefill", "decode"]


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the mesh. Unknown keys are ignored: a newer release may write more."""

    process_id: str
    role: Role
    address: str
    """Where its gRPC server listens, "host:port"."""
    boot_id: str
    """Random per start of the process."""
    model_version: str
    block_tokens: int
    kv_address: str = ""
    """Where its engine gives away KV blocks, "host:port". Prefill and decode only."""
    engine_boot_id: str = ""
    draining: bool = False
    capabilities: tuple[str, ...] = ()


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
        other = _boot_of(holder)
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


class View:
    """The members one process believes in. Pure: `take` gets what a poll found.

    A member that said farewell is gone at once. One whose lease is merely missing is gone when two polls, MISSING_S
    apart, did not find it: a Redis that was flushed knows those first who renewed first. Where the whole of Redis may
    have forgotten, everybody is kept for LEASE_S, in which every live process writes its lease again.
    """

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self._missing_since_s: dict[str, float] = {}
        self._farewells: set[str] = set()
        """Boot ids of members that gave their lease back."""
        self._doubt_until_s = float("-inf")

    def doubt(self, now_s: float) -> None:
        """Redis broke: what it lacks in the next LEASE_S says nothing."""
        self._doubt_until_s = now_s + LEASE_S

    def farewell(self, boot_id: str) -> None:
        """The process of that boot gave its lease back."""
        if any(member.boot_id == boot_id for member in self.members.values()):
            self._farewells.add(boot_id)

    def take(self, found: Iterable[Member], now_s: float) -> bool:
        """Take the answer of a poll. Return True if the view changed."""
        new = {member.process_id: member for member in found}
        missing = {name: self._missing_since_s.get(name, now_s) for name in self.members if name not in new}
        self._missing_since_s = missing
        if not new and self._is_sudden(now_s):
            self.doubt(now_s)  # all gone together: Redis was wiped faster than we looked
        for name, since_s in list(missing.items()):
            member = self.members[name]
            is_believed = now_s >= self._doubt_until_s and now_s - since_s >= MISSING_S
            if is_believed or member.boot_id in self._farewells:
                del missing[name]
            else:
                new[name] = member
        self._farewells &= {member.boot_id for member in new.values()}
        changed = new != self.members
        self.members = new
        return changed

    def _is_sudden(self, now_s: float) -> bool:
        silent = [member for member in self.members.values() if member.boot_id not in self._farewells]
        return bool(silent) and now_s >= self._doubt_until_s + LEASE_S


class Membership:
    """Keeps a View up to date. Owned by who calls `run`.

    `on_change` gets all members, ordered by process id, whenever something changed; also when the first poll is empty.
    """

    def __init__(
        self,
        redis: RedisLink,
        mesh: str,
        on_change: Callable[[list[Member]], None],
        clock: Clock | None = None,
        *,
        own: Registration | None = None,
    ) -> None:
        """`own`: while this lease cannot be written, missing ones of others say nothing."""
        self._redis = redis
        self._mesh = mesh
        self._own = own
        self._on_change = on_change
        self._clock = clock or MonotonicClock()
        self._view = View()
        self._polled = False

    @property
    def members(self) -> list[Member]:
        """All members, ordered by process id."""
        return [self._view.members[name] for name in sorted(self._view.members)]

    async def run(self) -> None:
        """Poll every POLL_S and at every nudge, until cancelled. No answer of Redis ends it."""
        await persist(self._follow, "membership", pause_s=AWAY_PAUSE_S, on_failure=self._on_failure)

    def _on_failure(self) -> None:
        self._view.doubt(self._clock.now_s())

    async def _follow(self) -> None:
        subscription = self._redis.subscription()
        try:
            await self._redis.watch(subscription.subscribe(key(self._mesh, "proc-news")))
            while True:
                await self.poll()
                news = await self._redis.watch(subscription.get_message(timeout=POLL_S))
                data = news.get("data") if news else None
                if isinstance(data, bytes) and data.startswith(FAREWELL):
                    self._view.farewell(data.removeprefix(FAREWELL).decode(errors="replace"))
        finally:
            with suppress(Exception):  # closing a broken connection tells nothing new
                await subscription.aclose()

    async def poll(self) -> None:
        """Look once. Raises RedisAway."""
        found = await read_members(self._redis, self._mesh)
        if self._own is not None and self._own.is_refused:
            self._view.doubt(self._clock.now_s())
        changed = self._view.take(found, self._clock.now_s())
        if changed or not self._polled:
            self._polled = True
            self._on_change(self.members)


async def read_members(redis: RedisLink, mesh: str) -> list[Member]:
    """Return the members that hold a lease now. Entries nobody can read are left out. Raises RedisAway."""
    names = sorted(
        name.decode(errors="replace") for name in await redis.execute("SMEMBERS", key(mesh, "procs"))
    )
    if not names:
        return []
    leases = await redis.execute("MGET", *(key(mesh, "proc", name) for name in names))
    members = []
    gone = []
    for name, lease in zip(names, leases, strict=True):
        if lease is None:
            gone.append(name)
            continue
        try:
            members.append(_decoder.decode(lease))
        except msgspec.DecodeError as error:
            log.warning("the lease of %s cannot be read: %s", name, error)
    if gone:  # a live process writes its name again at its next renewal
        with suppress(RedisAway):  # a Redis that takes no writes can be read all the same
            await redis.execute("SREM", key(mesh, "procs"), *gone)
    return members


_decoder = msgspec.json.Decoder(Member)


def _boot_of(lease: bytes | None) -> str:
    """Return the boot id in `lease`, or nothing if there is none that can be read."""
    try:
        return _decoder.decode(lease).boot_id if lease else ""
    except msgspec.DecodeError:
        return ""


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
