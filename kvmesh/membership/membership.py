"""Keeps a view of all leases in Redis up to date (service discovery). `view` decides which members count."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from kvmesh.clock import Clock, MonotonicClock
from kvmesh.membership.address_filter import AddressFilter
from kvmesh.membership.member import LEAVE_PREFIX, Member, read
from kvmesh.membership.registration import Registration
from kvmesh.membership.view import View
from kvmesh.redis_link import RedisLink, RedisUnavailable, key
from kvmesh.tasks import persist
from kvmesh.trust.networks import Networks

log = logging.getLogger(__name__)

POLL_S = 1.0
RETRY_PAUSE_S = 0.25


class Membership:
    """Keeps a View up to date. The task of `run` owns it.

    `on_change` gets all members, ordered by process id, after each change. It is also called if the first poll is empty.
    """

    def __init__(
        self,
        redis: RedisLink,
        mesh: str,
        on_change: Callable[[list[Member]], None],
        clock: Clock | None = None,
        *,
        own: Registration | None = None,
        address_filter: AddressFilter | None = None,
    ) -> None:
        """Set up the view.

        `address_filter` refuses members that may not be dialled. Without it all members are accepted. `own`: the
        registration of this process, which gets all changes. While its lease cannot be written, a missing lease of
        another process does not count.
        """
        self._redis = redis
        self._mesh = mesh
        self._own = own
        self._address_filter = address_filter or AddressFilter(Networks())
        self._on_change = on_change
        self._clock = clock or MonotonicClock()
        self._view = View()
        self._has_polled = False

    @property
    def members(self) -> list[Member]:
        """All members, ordered by process id."""
        return [self._view.members[name] for name in sorted(self._view.members)]

    async def run(self) -> None:
        """Poll every POLL_S and after each message of the channel, until cancelled. No answer of Redis ends it."""
        await persist(self._watch, "membership", pause_s=RETRY_PAUSE_S, on_failure=self._on_failure)

    def _on_failure(self) -> None:
        self._view.suspend_removals(self._clock.now_s())

    async def _watch(self) -> None:
        subscription = self._redis.subscription()
        try:
            await self._redis.guarded(subscription.subscribe(key(self._mesh, "proc-news")))
            while True:
                await self.poll()
                message = await self._redis.guarded(subscription.get_message(timeout=POLL_S))
                data = message.get("data") if message else None
                left_boot_id = ""
                if isinstance(data, bytes) and data.startswith(LEAVE_PREFIX):
                    left_boot_id = data.removeprefix(LEAVE_PREFIX).decode(errors="replace")
                    self._view.leave(left_boot_id)
                if data is not None and self._own is not None:
                    self._own.on_lease_change(left_boot_id)
        finally:
            with suppress(Exception):  # the failure of a broken connection is known already
                await subscription.aclose()

    async def poll(self) -> None:
        """Read the members once. Raises RedisUnavailable."""
        found = self._address_filter.take(await read_members(self._redis, self._mesh))
        if self._own is not None and self._own.is_refused:
            self._view.suspend_removals(self._clock.now_s())
        changed = self._view.take(found, self._clock.now_s())
        if changed or not self._has_polled:
            self._has_polled = True
            self._on_change(self.members)


async def read_members(redis: RedisLink, mesh: str) -> list[Member]:
    """Return the members that hold a lease now. Unreadable leases are skipped. Raises RedisUnavailable."""
    names = sorted(
        name.decode(errors="replace") for name in await redis.execute("SMEMBERS", key(mesh, "procs"))
    )
    if not names:
        return []
    leases = await redis.execute("MGET", *(key(mesh, "proc", name) for name in names))
    members = []
    expired = []
    for name, lease in zip(names, leases, strict=True):
        if lease is None:
            expired.append(name)
            continue
        member = read(name, lease)
        if member is None:
            log.warning("the lease of %s is unreadable or has another name", name)
        else:
            members.append(member)
    if expired:  # a live process adds its name again at its next renewal
        with suppress(RedisUnavailable):  # a read-only Redis still serves the reads
            await redis.execute("SREM", key(mesh, "procs"), *expired)
    return members
