"""One fault on one part: applies it, undoes it, and measures when the part serves again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from kvmesh.roles import CONTROL
from tests.chaos import census, faults
from tests.chaos.cells import DUPLICATE, Run
from tests.chaos.clients import PlainReader
from tests.chaos.held_watch import HeldWatch
from tests.chaos.plan import Stream, members_of
from tests.chaos.probing import LOOK_EVERY_S, SERVED_S_MAX, Probing
from tests.chaos.records import Moments, Seen
from tests.chaos.rig import Rig
from tests.integration.live_mesh import until

RETURN_S_MAX: Final = 60.0
"""A part without an answer to health this long after its fault is lost."""


def _nothing() -> None:
    return None


class Disturbance:
    """`now_s` is the runner's clock. Not to be run twice."""

    def __init__(
        self,
        rig: Rig,
        run: Run,
        target: str,
        away_s: float,
        now_s: Callable[[], float],
        peer: str | None = None,
        watch: HeldWatch | None = None,
    ) -> None:
        """`peer`: the only part that `target` is cut off from (see plan.peer_of). `watch`: of a replica that is held."""
        self._rig = rig
        self._run = run
        self._target = target
        self._away_s = away_s
        self._now_s = now_s
        self._peer = peer
        self._watch = watch
        self.probes: list[tuple[Stream, Seen | None]] = []
        """Probing requests for the returned part; None for a cancelled one."""

    async def run(
        self, on_fault: Callable[[], None] = _nothing, on_return: Callable[[], None] = _nothing
    ) -> Moments:
        """Apply and undo the fault; return the times. Raises AssertionError if the part does not come back."""
        fault, ends = self._run.cell.fault, self._run.cell.ends_the_part
        fault_s = self._now_s()
        on_fault()
        means = await faults.apply(self._rig.faults, fault, self._target, self._peer)
        if fault == DUPLICATE:
            await until(
                self._is_superseded, RETURN_S_MAX, f"{self._target} is superseded", every_s=LOOK_EVERY_S
            )
        gone_s = self._now_s() if ends else fault_s
        await asyncio.sleep(max(0.0, gone_s + self._away_s - self._now_s()))
        mended_s = self._now_s()
        await faults.undo(self._rig.faults, fault, self._target)
        await until(self._is_back, RETURN_S_MAX, f"{self._target} answers health again", every_s=LOOK_EVERY_S)
        returned_s = self._now_s()
        on_return()
        served_s = await self._first_served()
        return Moments(fault_s, gone_s, mended_s, returned_s, served_s, means)

    async def _is_back(self) -> bool:
        return all([await census.is_serving(self._rig, name) for name in members_of(self._target)])

    async def _is_superseded(self) -> bool:
        return not await census.is_serving(self._rig, self._target)

    async def _first_served(self) -> float | None:
        """Return the time at which the returned part served a request, None if it did not in time."""
        if self._target == "redis":
            return await self._used(self._is_redis_used, "Redis is used again")
        if self._run.cell.part == CONTROL:
            return await self._used(self._is_control_used, "the control plane is used again")
        if self._watch is not None and await self._watch.until_in_service() is None:
            return None
        plain = PlainReader(lambda number: self._rig.mesh.parts[f"frontend-{number}"].address)
        probing = Probing(self._run, self._target, plain, self._now_s)
        try:
            return await probing.first_served()
        finally:
            self.probes = probing.probes

    async def _used(self, condition: Callable[[], Awaitable[bool]], what: str) -> float | None:
        """Return the time at which `condition` held: every process was registered, or had its snapshot, again."""
        with suppress(AssertionError):
            await until(condition, SERVED_S_MAX, what, every_s=LOOK_EVERY_S)
            return self._now_s()
        return None

    async def _is_control_used(self) -> bool:
        with suppress(census.Unreachable):
            return await census.control_serves(self._rig)
        return False

    async def _is_redis_used(self) -> bool:
        for name in self._rig.mesh.running("router"):
            if not (await self._rig.mesh.status(name)).redis_connected:
                return False
        everybody = set(self._rig.mesh.running("frontend", "router", "prefill", "decode"))
        return await census.registered(self._rig, self._rig.mesh.config.mesh.name) == everybody
