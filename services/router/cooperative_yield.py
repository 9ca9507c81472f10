"""Cooperative yield: gives the event loop a turn during long work."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Final, TypeVar

from kvmesh.clock import Clock

SLICE_S: Final = 0.002
"""The event loop gets a turn after this much work."""

Result = TypeVar("Result")


class CooperativeYield:
    """Yields to the event loop between the slices of a long piece of work."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s = clock.now_s()

    async def yield_if_due(self) -> None:
        """Let the event loop run if the present slice has taken long enough."""
        if self._clock.now_s() - self._since_s > SLICE_S:
            await asyncio.sleep(0)
            self._since_s = self._clock.now_s()

    async def run_slices(self, slices: Generator[None, None, Result]) -> Result:
        """Run `slices` to their end, yield to the event loop when due, and return their result."""
        while True:
            try:
                next(slices)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]  # Result: the type of StopIteration says less
            await self.yield_if_due()
