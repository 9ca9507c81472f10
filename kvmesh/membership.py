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

log = logging.getLogger(__name__)

LEASE_S = 3.0
RENEW_S = 1.0
POLL_S = 1.0

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
    """Keeps one member's lease. Owned by who calls `run`; call `deregister` at a clean shutdown, after `run` ended."""

    def __init__(self, redis: RedisLink, mesh: str, member: Member) -> None:
        self.member = member
        self._redis = redis
        self._mesh = mesh
        self._changed = asyncio.Event()

    def update(self, **changes: Any) -> None:
        """Change fields of the member (`draining=True`); written at once if `run` runs."""
        member = msgspec.structs.replace(self.member, **changes)
        if member != self.member:
            self.member = member
            self._changed.set()

    async def run(self) -> None:
        """Renew the lease until cancelled."""
        announce = True
        while True:
            self._changed.clear()
            try:
                await self._write(announce)
                announce = False
            except RedisAway:
                announce = True
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await self._changed.wait()
                announce = True

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
            )

    async def _write(self, announce: bool) -> None:
        member = self.member
        commands: list[tuple[str | bytes | int, ...]] = [
            (
                "SET",
                key(self._mesh, "proc", member.process_id),
                msgspec.json.encode(member),
                "PX",
                int(LEASE_S * 1000),
            ),
            ("SADD", key(self._mesh, "procs"), member.process_id),
        ]
        if announce:
            commands.append(("PUBLISH", key(self._mesh, "proc-news"), member.process_id))
        await self._redis.pipeline(commands)


class View:
    """The members one process believes in. Pure: `take` gets what a poll found.

    A member missing from a poll is gone at once, unless the whole of Redis may have forgotten: then it is kept for
    LEASE_S, in which every live process writes its lease again.
    """

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self._doubt_until_s = float("-inf")

    def doubt(self, now_s: float) -> None:
        """Redis broke: what it lacks in the next LEASE_S says nothing."""
        self._doubt_until_s = now_s + LEASE_S

    def take(self, found: Iterable[Member], now_s: float) -> bool:
        """Take the answer of a poll. Return True if the view changed."""
        new = {member.process_id: member for member in found}
        if not new and self.members and now_s >= self._doubt_until_s + LEASE_S:
            self.doubt(now_s)  # all gone together: Redis was wiped faster than we looked
        if now_s < self._doubt_until_s:
            new = {**self.members, **new}
        changed = new != self.members
        self.members = new
        return changed


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
    ) -> None:
        self._redis = redis
        self._mesh = mesh
        self._on_change = on_change
        self._clock = clock or MonotonicClock()
        self._view = View()
        self._polled = False

    @property
    def members(self) -> list[Member]:
        """All members, ordered by process id."""
        return [self._view.members[name] for name in sorted(self._view.members)]

    async def run(self) -> None:
        """Poll every POLL_S and at every nudge, until cancelled."""
        while True:
            try:
                await self._follow()
            except RedisAway:
                self._view.doubt(self._clock.now_s())
            await asyncio.sleep(POLL_S / 4)

    async def _follow(self) -> None:
        subscription = self._redis.subscription()
        try:
            await self._redis.watch(subscription.subscribe(key(self._mesh, "proc-news")))
            while True:
                await self.poll()
                await self._redis.watch(subscription.get_message(timeout=POLL_S))
        finally:
            with suppress(Exception):  # closing a broken connection tells nothing new
                await subscription.aclose()

    async def poll(self) -> None:
        """Look once. Raises RedisAway."""
        found = await read_members(self._redis, self._mesh)
        changed = self._view.take(found, self._clock.now_s())
        if changed or not self._polled:
            self._polled = True
            self._on_change(self.members)


async def read_members(redis: RedisLink, mesh: str) -> list[Member]:
    """Return the members that hold a lease now. Entries nobody can read are left out. Raises RedisAway."""
    names = sorted(name.decode() for name in await redis.execute("SMEMBERS", key(mesh, "procs")))
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
        await redis.execute("SREM", key(mesh, "procs"), *gone)
    return members


_decoder = msgspec.json.Decoder(Member)

_DEREGISTER = """
local lease = redis.call('GET', KEYS[1])
if lease and string.find(lease, ARGV[1], 1, true) then
  redis.call('DEL', KEYS[1])
  redis.call('SREM', KEYS[2], ARGV[2])
  redis.call('PUBLISH', ARGV[3], ARGV[2])
end
return 0
"""
