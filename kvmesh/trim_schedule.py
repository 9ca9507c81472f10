"""When a process asks the C library for what it has freed. Pure."""

from __future__ import annotations

from typing import Final

GROWTH_BYTES: Final = 8 << 20
"""Growth since the last trim that makes the next one worth its while."""

FOLLOW_UPS: Final = 6
"""Looks after such a trim that trim as well: what made the process grow is freed bit by bit."""


class TrimSchedule:
    """Invariant: a process that neither grows nor has just grown is left alone, however large it is."""

    def __init__(self, resident_bytes: int) -> None:
        self.trimmed_total = 0
        self._kept_bytes = resident_bytes
        """What the last trim left, or less where less was seen since."""
        self._follow_ups = 0

    def is_due(self, resident_bytes: int) -> bool:
        """Return whether to trim now. Asked at each look, once; `done` follows where it is."""
        self._kept_bytes = min(self._kept_bytes, resident_bytes)
        if resident_bytes - self._kept_bytes >= GROWTH_BYTES:
            self._follow_ups = FOLLOW_UPS
            return True
        self._follow_ups = max(0, self._follow_ups - 1)
        return self._follow_ups > 0

    def done(self, resident_bytes: int) -> None:
        """Note what a trim has left."""
        self.trimmed_total += 1
        self._kept_bytes = resident_bytes
