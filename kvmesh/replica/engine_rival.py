"""Two replicas with one engine: a mistake in the addresses. Decisions are in `rival_of`.

Both would count the engine's blocks and places as theirs, and routers would place twice of what it holds. A replica looks
before it registers, and ends beside a replica that has. Of two that start at once neither sees the other in time. They see
each other's leases, and the one with the greater name ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from kvmesh.membership.member import Member
from kvmesh.triton.capabilities import ModelRefused

MEMBERS_S: Final = 2.0
"""Longest wait for the first view of the members. Without Redis nobody is known, and the mesh serves on."""

RIVAL_WAIT_S: Final = 10.0
"""Longest wait for the lease of another replica with the same engine to end. A replica that died leaves one for seconds."""


def rival_of(process_id: str, engine_boot_id: str, members: Iterable[Member]) -> str:
    """Return the first name of another replica whose lease names the same boot of an engine; empty: there is none."""
    if not engine_boot_id:
        return ""
    names = (
        one.process_id
        for one in members
        if one.engine_boot_id == engine_boot_id and one.process_id != process_id
    )
    return min(names, default="")


class EngineRival:
    """Ends the process beside a rival. `take_members` and `take_engine` bring news. The caller runs `watch` as a task."""

    def __init__(self, process_id: str, rival_wait_s: float = RIVAL_WAIT_S) -> None:
        self._process_id = process_id
        self._rival_wait_s = rival_wait_s
        self._engine_boot_id = ""
        self._members: list[Member] | None = None
        """None: not known yet."""
        self._has_looked = asyncio.Event()
        self._changed = asyncio.Event()

    def take_members(self, members: list[Member]) -> None:
        """Take a view of the mesh."""
        self._members = members
        self._changed.set()

    def take_engine(self, boot_id: str) -> None:
        """Take the boot of the engine. Empty: unknown."""
        self._engine_boot_id = boot_id
        self._changed.set()

    async def look(self) -> None:
        """Return once no registered replica has the engine. Raises ModelRefused if one still has after RIVAL_WAIT_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(MEMBERS_S):
                await self._until(lambda: self._members is not None)
        await self._outlive(self._rival)
        self._has_looked.set()

    async def watch(self) -> None:
        """Never return. Raises ModelRefused if, after `look`, a replica with a smaller name has the engine."""
        await self._has_looked.wait()
        while True:
            await self._until(lambda: bool(self._smaller_rival()))
            await self._outlive(self._smaller_rival)

    def _rival(self) -> str:
        return rival_of(self._process_id, self._engine_boot_id, self._members or ())

    def _smaller_rival(self) -> str:
        rival = self._rival()
        return rival if rival < self._process_id else ""

    async def _outlive(self, find: Callable[[], str]) -> None:
        rival = find()
        try:
            async with asyncio.timeout(self._rival_wait_s):
                await self._until(lambda: not find())
        except TimeoutError:
            raise ModelRefused(
                f"The engine of {self._process_id} is that of {rival} too: allowed is an engine for each replica."
            ) from None

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()
