"""Resident memory of the parts of a mesh: the kernel's peak since a moment, and the present value."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.family import family

_RESET_PEAK: Final = "5"
"""proc(5), /proc/pid/clear_refs: sets the highest resident memory to the resident memory."""


def reset_peaks(pids: Mapping[str, int]) -> None:
    """Reset the memory peaks of parts, given by name and first process."""
    for pid in pids.values():
        for one in family(pid):
            with suppress(OSError):
                Path(f"/proc/{one}/clear_refs").write_text(_RESET_PEAK, encoding="ascii")


def peaks_mb(pids: Mapping[str, int]) -> dict[str, float]:
    """Return the highest resident memory of each part since `reset_peaks`; of an engine the sum over its processes."""
    return {name: sum(_status_mb(one, "VmHWM") for one in family(pid)) for name, pid in pids.items()}


def now_mb(pids: Mapping[str, int]) -> dict[str, float]:
    """Return the resident memory of each part."""
    return {name: sum(_status_mb(one, "VmRSS") for one in family(pid)) for name, pid in pids.items()}


def _status_mb(pid: int, field: str) -> float:
    with suppress(OSError, IndexError):
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        return int(text.partition(f"{field}:")[2].split()[0]) * 1024 / 1e6
    return 0.0
