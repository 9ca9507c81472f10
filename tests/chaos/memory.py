"""Samples the memory of every process of a mesh during other work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tests.chaos.census import resident_bytes
from tests.chaos.rig import Rig
from tests.chaos.slopes import Sample

EVERY_S: Final = 5.0


class MemoryLog:
    """Samples by process. A process that is not running gives none."""

    def __init__(self, rig: Rig, now_s: Callable[[], float]) -> None:
        self._rig = rig
        self._now_s = now_s
        self._lives: dict[str, list[str]] = {name: [] for name in rig.mesh.parts}
        self.samples: dict[str, list[Sample]] = {name: [] for name in rig.mesh.parts}

    async def run(self) -> None:
        """Sample until cancelled."""
        at_s = self._now_s()
        while True:
            for name in self._rig.mesh.parts:
                await self._sample(name)
            at_s += EVERY_S
            await asyncio.sleep(max(0.0, at_s - self._now_s()))

    async def _sample(self, name: str) -> None:
        body = await self._rig.body(name)
        if not body.pid or not (size := resident_bytes(body.pid)):
            return
        lives = self._lives[name]
        if body.life not in lives:
            lives.append(body.life)
        self.samples[name].append(Sample(round(self._now_s(), 1), lives.index(body.life), size / 1e6))
