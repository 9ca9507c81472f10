"""Probing requests that measure when a returned part serves again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tests.chaos.cells import Run
from tests.chaos.clients import Reader, live
from tests.chaos.plan import Stream, probe_of, replica_of
from tests.chaos.records import COMPLETE, Seen

SERVED_S_MAX: Final = 15.0
"""A part that serves no request this long after its return is no longer in use."""

LOOK_EVERY_S: Final = 0.05

PROBES: Final = 4
"""Initial number of concurrent probes: idle replicas are chosen by load."""

PROBES_MAX: Final = 32
"""Largest number of concurrent probes. A decode replica with an older long stream is the fuller one until that stream ends:
the stream has as many blocks as ten probes. So each probe that another replica served is followed by one more."""


class Probing:
    """Sends probes until one of them is served by `target`. `now_s` is the runner's clock. Not to be run twice."""

    def __init__(self, run: Run, target: str, reader: Reader, now_s: Callable[[], float]) -> None:
        self._run = run
        self._target = target
        self._reader = reader
        self._now_s = now_s
        self.probes: list[tuple[Stream, Seen | None]] = []
        """Probes and their responses; None for a cancelled probe."""

    async def first_served(self, within_s: float = SERVED_S_MAX) -> float | None:
        """Return the time of the part's first token for a probe, None without one in time."""
        streams: dict[asyncio.Task[Seen], Stream] = {}
        probes: set[asyncio.Task[Seen]] = set()
        wanted, give_up_s = PROBES, self._now_s() + within_s
        try:
            while self._now_s() < give_up_s:
                while len(probes) < wanted:
                    stream = probe_of(self._run, len(streams) + 1, self._frontend(len(streams) + 1))
                    probe = asyncio.create_task(live(stream, self._reader, self._now_s))
                    probes.add(probe)
                    streams[probe] = stream
                done, probes = await asyncio.wait(
                    probes, timeout=give_up_s - self._now_s(), return_when=asyncio.FIRST_COMPLETED
                )
                answered = [one for one in (task.result() for task in done) if one.end == COMPLETE]
                hits = [one for one in answered if replica_of(self._target) in one.parts]
                if hits:
                    return min(one.came_s[1] for one in hits)
                wanted = min(PROBES_MAX, wanted + len(answered))
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            for task in probes:
                task.cancel()
            await asyncio.gather(*probes, return_exceptions=True)
            self.probes = [
                (stream, None if task.cancelled() else task.result()) for task, stream in streams.items()
            ]
        return None

    def _frontend(self, number: int) -> int:
        """Return the frontend of a probe: the returned one, or both in turn."""
        name, _, replica = self._target.rpartition("-")
        return int(replica) if name == "frontend" else number % 2
