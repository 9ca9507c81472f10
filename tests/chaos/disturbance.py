"""One fault on one part: hit it, bring it back, and find out when it serves again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from tests.chaos import census, faults
from tests.chaos.cells import Run
from tests.chaos.clients import PlainReader, live
from tests.chaos.plan import Stream, probe_of
from tests.chaos.records import COMPLETE, Moments, Seen
from tests.chaos.rig import Rig
from tests.integration.live_mesh import until

RETURN_S_MAX: Final = 60.0
"""A part that does not answer health this long after its fault is over does not come back."""

SERVED_S_MAX: Final = 15.0
"""A part that serves no request this long after its return is not used any more."""

LOOK_EVERY_S: Final = 0.05

PROBES: Final = 4
"""Requests that look for the returned part, at once: idle replicas are chosen by load."""


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
    ) -> None:
        """`peer`: the only part that `target` is cut off from (see plan.peer_of)."""
        self._rig = rig
        self._run = run
        self._target = target
        self._away_s = away_s
        self._now_s = now_s
        self._peer = peer
        self.probes: list[tuple[Stream, Seen | None]] = []
        """Requests that looked for the returned part; None where one was cancelled."""
        self._plain = PlainReader(lambda number: rig.mesh.parts[f"frontend-{number}"].address)

    async def run(
        self, on_fault: Callable[[], None] = _nothing, on_return: Callable[[], None] = _nothing
    ) -> Moments:
        """Do it and return when what happened. Raises AssertionError if the part does not come back."""
        fault, ends = self._run.cell.fault, self._run.cell.ends_the_part
        fault_s = self._now_s()
        on_fault()
        means = await faults.apply(self._rig.faults, fault, self._target, self._peer)
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
        return await census.is_serving(self._rig, self._target)

    async def _first_served(self) -> float | None:
        """Return when the returned part served a request, None if it did not in time."""
        if self._target == "redis":
            return await self._redis_used()
        number = 0
        probes: set[asyncio.Task[Seen]] = set()
        streams: dict[asyncio.Task[Seen], Stream] = {}
        give_up_s = self._now_s() + SERVED_S_MAX
        try:
            while self._now_s() < give_up_s:
                while len(probes) < PROBES:
                    number += 1
                    stream = probe_of(self._run, number, self._probed_frontend(number))
                    probe = asyncio.create_task(live(stream, self._plain, self._now_s))
                    probes.add(probe)
                    streams[probe] = stream
                done, probes = await asyncio.wait(
                    probes, timeout=give_up_s - self._now_s(), return_when=asyncio.FIRST_COMPLETED
                )
                hits = [task.result() for task in done if self._is_served(task.result())]
                if hits:
                    return min(one.came_s[1] for one in hits)
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            for task in probes:
                task.cancel()
            await asyncio.gather(*probes, return_exceptions=True)
            self.probes = [
                (stream, None if task.cancelled() else task.result()) for task, stream in streams.items()
            ]
        return None

    def _probed_frontend(self, number: int) -> int:
        """Probes go to the returned frontend, or to both in turn."""
        name, _, replica = self._target.rpartition("-")
        return int(replica) if name == "frontend" else number % 2

    def _is_served(self, one: Seen) -> bool:
        return one.end == COMPLETE and self._target.removesuffix("-engine") in one.parts

    async def _redis_used(self) -> float | None:
        """Return when every router and replica was registered and connected again."""
        with suppress(AssertionError):
            await until(self._is_redis_used, SERVED_S_MAX, "Redis is used again", every_s=LOOK_EVERY_S)
            return self._now_s()
        return None

    async def _is_redis_used(self) -> bool:
        for name in self._rig.mesh.running("router"):
            if not (await self._rig.mesh.status(name)).redis_connected:
                return False
        everybody = set(self._rig.mesh.running("frontend", "router", "prefill", "decode"))
        return await census.registered(self._rig, self._rig.mesh.config.mesh.name) == everybody
