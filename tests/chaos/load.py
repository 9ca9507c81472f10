"""The load of a soak: an endless sequence of streams, at a rate or at a concurrency."""

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
"""Streams after which the three shared beginnings of prompts change: caches turn over."""


@dataclass(slots=True)
class Load:
    """Draws streams from a seed and runs them; keeps the streams and the responses, in the order of their ends."""

    reader: Reader
    now_s: Callable[[], float]
    rng: random.Random
    streams: list[Stream] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    _shared: list[tuple[int, ...]] = field(default_factory=list)

    async def one(self) -> None:
        """Run one more stream, through a client that resumes at another frontend."""
        number = len(self.streams)
        if number % FRESH_EVERY == 0:
            self._shared = shared_beginnings(self.rng)
        stream = stream_of(self.rng, number, BEFORE, self._shared, is_plain=False)
        self.streams.append(stream)
        self.seen.append(await live(stream, self.reader, self.now_s))

    async def at_once(self, count: int, seconds: float) -> None:
        """Keep `count` streams under way for `seconds`, then cancel them."""

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
        """Start streams at random times, `per_s` on average, until `until_s`; return when all have ended."""
        async with asyncio.TaskGroup() as group:
            next_s = self.now_s()
            while (next_s := next_s + self.rng.expovariate(per_s)) < until_s:
                await asyncio.sleep(max(0.0, next_s - self.now_s()))
                group.create_task(self.one())
