"""How busy the machine was."""

from __future__ import annotations

from pathlib import Path


class CpuShare:
    """Measures from its construction on, over all cores of the machine."""

    def __init__(self) -> None:
        self._busy, self._all = _ticks()

    def share(self) -> float:
        """Return the share of time since then in which cores worked, 0 to 1."""
        busy, total = _ticks()
        return (busy - self._busy) / max(1, total - self._all)


def _ticks() -> tuple[int, int]:
    """Return (busy, all) ticks of all cores since the start of the machine (proc(5), /proc/stat)."""
    with Path("/proc/stat").open(encoding="ascii") as file:
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    busy = user + nice + system + irq + softirq + steal
    return busy, busy + idle + iowait
