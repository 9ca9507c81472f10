"""Streams without end: at a rate, or so many at once. What a soak puts on the mesh."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tests.chaos.clients import Reader, live
from tests.chaos.plan import BEFORE, Stream, shared_beginnings, stream_of
from tests.chaos.records import Seen

FRESH_EVERY: Final = 300
"""Prompts begin with one of three beginnings, which are others after so many streams: caches turn over."""


@dataclass(slots=True)
class Load:
    """Draws streams from a seed and lives them; keeps what was sent and what came, in the order of the ends."""

    reader: Reader
    now_s: Callable[[], float]
    rng: random.Random
    streams: list[Stream] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    _shared: list[tuple[int, ...]] = field(default_factory=list)

    async def one(self) -> None:
        """Live one more stream, through a client that can go on elsewhere."""
        number = len(self.streams)
        if number % FRESH_EVERY == 0:
            self._shared = shared_beginnings(self.rng)
        stream = stream_of(self.rng, number, BEFORE, self._shared, is_plain=False)
        self.streams.append(stream)
        self.seen.append(await live(stream, self.reader, self.now_s))

    async def at_once(self, count: int, seconds: float) -> None:
        """Keep `count` streams under way for `seconds`, then leave them."""

        async def client() -> None:
            while True:
                await self.one()

        tasks = [asyncio.create_task(client()) for _ in range(count)]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(result, asyncio.CancelledError):
                raise AssertionError(f"a client ended: {result!r}")

    async def at_rate(self, per_s: float, until_s: float) -> None:
        """Start streams by chance, `per_s` on average, until the clock says `until_s`; returns when all have ended."""
        async with asyncio.TaskGroup() as group:
            next_s = self.now_s()
            while (next_s := next_s + self.rng.expovariate(per_s)) < until_s:
                await asyncio.sleep(max(0.0, next_s - self.now_s()))
                group.create_task(self.one())
