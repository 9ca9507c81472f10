"""Measures the load of the machine, and its delays of the runner itself."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final

TICK_S: Final = 0.05


class CpuShare:
    """Measures from its construction on, over all cores of the machine."""

    def __init__(self) -> None:
        self._busy, self._all = _ticks()

    def share(self) -> float:
        """Return the share of busy core time since construction, 0 to 1."""
        busy, total = _ticks()
        return (busy - self._busy) / max(1, total - self._all)


class Lateness:
    """Longest delay of the runner's event loop past its wake time: its clients were as late."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            asked_s = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self.longest_s = max(self.longest_s, time.monotonic() - asked_s)


def _ticks() -> tuple[int, int]:
    """Return (busy, all) ticks of all cores since the start of the machine (proc(5), /proc/stat)."""
    with Path("/proc/stat").open(encoding="ascii") as file:
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    busy = user + nice + system + irq + softirq + steal
    return busy, busy + idle + iowait
