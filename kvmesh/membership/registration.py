"""Heartbeats of a process: renews its lease in Redis, which has a time to live. `election` decides what to write."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import msgspec

from kvmesh.clock import Clock, MonotonicClock
from kvmesh.membership.election import Election, ElectionState
from kvmesh.membership.member import LEASE_S, LEAVE_PREFIX, RENEW_S, Member
from kvmesh.membership.region_claim import RegionClaim
from kvmesh.redis_link import RedisLink, RedisUnavailable, key
from kvmesh.redis_script import Script
from kvmesh.tasks import persist

log = logging.getLogger(__name__)

_CLAIM: Final = Script.beside(__file__, "claim_lease.lua")
_RELEASE: Final = Script.beside(__file__, "release_lease.lua")

RETRY_PAUSE_S = 0.25


async def _ignore(reason: str) -> None:
    """Do nothing."""


class Registration:
    """Keeps the lease of one member. The task of `run` owns it.

    Call `deregister` at a graceful shutdown, after `run` ended.

    If two processes have one name, the later one holds it (`election`). The other process is superseded. It keeps its
    streams, and takes the name back when the holder ends.
    """

    def __init__(
        self,
        redis: RedisLink,
        mesh: str,
        member: Member,
        on_name_state: Callable[[str], Awaitable[None]] = _ignore,
        clock: Clock | None = None,
        claim: RegionClaim | None = None,
    ) -> None:
        """Describe the member to register.

        `on_name_state` gets the reason when another process takes the name or when Redis belongs to another region, and
        an empty text when this process holds its name. `claim`: the region's claim on Redis. None: any Redis will do.
        """
        self.member = member
        self.is_refused = False
        """True while Redis does not write the lease. It then probably writes no lease of another process, either."""
        self.has_held = False
        """True once the lease was written: from then on peers can know this process."""
        self.superseded_total = 0
        """Number of times that another process took the name."""
        self._redis = redis
        self._mesh = mesh
        self._on_name_state = on_name_state
        self._clock = clock or MonotonicClock()
        self._claim = claim
        self._election = Election(member.process_id, member.boot_id)
        self._reason: str | None = None
        """The last reported reason. None: nothing was reported."""
        self._has_changed = False
        """True while the member differs from the last written lease."""
        self._changed = asyncio.Event()

    @property
    def is_superseded(self) -> bool:
        """True while another process holds the name."""
        return self._election.state is ElectionState.STANDBY

    @property
    def is_holder(self) -> bool:
        """True while this process holds its name, as far as it knows."""
        return self._election.state is ElectionState.HOLDER

    def update(self, **changes: Any) -> None:
        """Change fields of the member (`draining=True`). A running `run` writes them at once."""
        member = msgspec.structs.replace(self.member, **changes)
        if member != self.member:
            self.member, self._has_changed = member, True
            self._changed.set()

    def note(self, **changes: Any) -> None:
        """Change fields of the member. The next renewal writes them, and other processes see them at their next poll."""
        self.member = msgspec.structs.replace(self.member, **changes)

    def on_lease_change(self, left_boot_id: str) -> None:
        """Take the news of a changed lease. A standby then reads its lease at once.

        `left_boot_id`: the boot id of a process that gave its lease back, or empty.
        """
        if self._election.state is ElectionState.STANDBY:
            self._election.on_leave(left_boot_id)
            self._changed.set()

    async def run(self) -> None:
        """Renew the lease until cancelled. No answer of Redis ends it."""
        await persist(self._keep, "registration", pause_s=RETRY_PAUSE_S, on_failure=self._on_failure)

    async def _keep(self) -> None:
        while True:
            self._changed.clear()
            if fault := await self._claim.fault() if self._claim is not None else "":
                await self._refuse(fault)
                continue
            announce, self._has_changed = self._has_changed, False
            await self._bid(announce)
            self.is_refused = False
            await self._report()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._election.wait_s(self._clock.now_s())):
                    await self._changed.wait()

    async def _refuse(self, fault: str) -> None:
        """Report that Redis belongs to another region, and wait for the next attempt. No lease is written."""
        self.is_refused = self._has_changed = True
        if self._reason != fault:
            self._reason = fault
            log.error("%s", fault)
            await self._on_name_state(fault)
        await asyncio.sleep(RENEW_S)

    def _on_failure(self) -> None:
        self.is_refused = self._has_changed = True
        if self._claim is not None:
            self._claim.on_failure()
        self._election.fail(self._clock.now_s())

    async def deregister(self) -> None:
        """Give the lease back, unless another process of the same name holds it. Never raises RedisUnavailable."""
        with suppress(RedisUnavailable):
            await self._redis.execute(
                "EVAL",
                _RELEASE.text,
                2,
                key(self._mesh, "proc", self.member.process_id),
                key(self._mesh, "procs"),
                msgspec.json.encode(self.member.boot_id),
                self.member.process_id,
                key(self._mesh, "proc-news"),
                LEAVE_PREFIX + self.member.boot_id.encode(),
            )

    async def _bid(self, announce: bool) -> None:
        member, election = self.member, self._election
        bid = election.bid(self._clock.now_s(), is_draining=member.is_leaving)
        lease = msgspec.json.encode(msgspec.structs.replace(member, term=bid.term)) if bid else b""
        wrote, found, left_ms = await self._redis.execute(
            "EVAL",
            _CLAIM.text,
            2,
            key(self._mesh, "proc", member.process_id),
            key(self._mesh, "procs"),
            lease,
            int(LEASE_S * 1000),
            member.process_id,
            key(self._mesh, "proc-news"),
            b"announce" if announce else b"",
            msgspec.json.encode(member.boot_id),
            bid.replaces if bid else b"",
        )
        election.take(
            bid,
            wrote=bool(wrote),
            found=found or b"",
            left_s=left_ms / 1000,
            now_s=self._clock.now_s(),
            is_draining=member.is_leaving,
        )
        if wrote:
            self.has_held = True

    async def _report(self) -> None:
        """Log and report a change of the holder, once."""
        if self._election.state is ElectionState.NEWCOMER:
            return
        reason, was = self._why(), self._reason
        self._reason = reason
        if reason and not was:
            self.superseded_total += 1
        if reason and reason != was:
            log.log(logging.INFO if self.member.is_leaving else logging.ERROR, "%s", reason)
        elif was and not reason:
            log.info("%s holds its name again", self.member.process_id)
        if reason != was:
            await self._on_name_state(reason)

    def _why(self) -> str:
        """Return the reason why this process does not hold its name, or an empty text."""
        holder, name = self._election.holder, self.member.process_id
        if holder is None:
            return ""
        return (
            f"superseded: another process named {name} (boot {holder.boot_id}, at {holder.address}) holds the name; "
            "this process keeps its streams, and takes the name when the other process ends"
        )
