"""How fast something comes free, and so when enough of it will have. Pure."""

from __future__ import annotations

import math
from typing import Final

WINDOW_S: Final = 5.0
"""What was freed longer ago counts for a third, and so on."""

WAIT_MS_MAX: Final = 30_000
"""Longer waits are not promised to anybody: by then everything may be different."""


class DrainRate:
    """Units per second, weighted by exp(-age / WINDOW_S). Units: KV blocks, slots."""

    __slots__ = ("_began_s", "_level", "_seen_s")

    def __init__(self) -> None:
        self._began_s: float | None = None
        """When it began to be measured: the window is shorter until it is full."""
        self._level = 0.0
        """Weighted sum of what came free, as of `_seen_s`."""
        self._seen_s = 0.0

    def begin(self, now_s: float) -> None:
        """Something was taken: from now on nothing coming free is news too. More than once does nothing."""
        if self._began_s is None:
            self._began_s = self._seen_s = now_s

    def freed(self, units: float, now_s: float) -> None:
        """`units` came free."""
        self.begin(now_s)
        self._level = self._decayed(now_s) + units
        self._seen_s = max(self._seen_s, now_s)

    def per_s(self, now_s: float) -> float:
        """Return the units that come free per second. 0: none yet."""
        if self._began_s is None or not self._level:
            return 0.0
        # Below a tenth of the window the first few releases would look like a flood.
        age_s = max(0.1 * WINDOW_S, now_s - self._began_s)
        return self._decayed(now_s) / (WINDOW_S * -math.expm1(-age_s / WINDOW_S))

    def wait_ms(self, units: float, now_s: float) -> int:
        """Return the milliseconds, 1 to WAIT_MS_MAX, until `units` more are likely to be free. 0: unknown."""
        rate = self.per_s(now_s)
        if rate <= 0:
            return 0
        return max(1, round(min(WAIT_MS_MAX, max(0.0, units) / rate * 1000)))

    def _decayed(self, now_s: float) -> float:
        return self._level * math.exp(-max(0.0, now_s - self._seen_s) / WINDOW_S)
