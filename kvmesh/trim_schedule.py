"""Times at which a process returns freed memory to the kernel (malloc_trim). Pure."""

from __future__ import annotations

from typing import Final

GROWTH_BYTES: Final = 8 << 20
"""Growth since the last trim that causes the next one."""

FOLLOW_UPS: Final = 6
"""Trims in a row after growth, the first included, because the memory behind the growth is freed step by step."""


class TrimSchedule:
    """INVARIANT: a process without recent growth is not trimmed, at any size."""

    def __init__(self, resident_bytes: int) -> None:
        self.trimmed_total = 0
        self._kept_bytes = resident_bytes
        """Lowest resident memory since the last trim."""
        self._follow_ups = 0

    def is_due(self, resident_bytes: int) -> bool:
        """Return True if the process should trim now. Call it once at each check. `done` follows a trim."""
        self._kept_bytes = min(self._kept_bytes, resident_bytes)
        if resident_bytes - self._kept_bytes >= GROWTH_BYTES:
            self._follow_ups = FOLLOW_UPS
            return True
        self._follow_ups = max(0, self._follow_ups - 1)
        return self._follow_ups > 0

    def done(self, resident_bytes: int) -> None:
        """Take the resident memory after a trim."""
        self.trimmed_total += 1
        self._kept_bytes = resident_bytes
