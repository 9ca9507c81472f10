"""Ratios of running totals over the last minute, for example computed tokens over seconds of prefill. Pure."""

from __future__ import annotations

import math
from typing import Final

SMOOTHING_S: Final = 60.0
"""Time in which the weight of a measurement falls to 1/e."""

WEIGHT_MIN: Final = 1e-9
"""Weight, in seconds, below which old sums are too small to divide. The ratio is then kept as it is."""


class SmoothedRatio:
    """Ratio of two running totals, smoothed over SMOOTHING_S of the time in which they grow.

    Without new amounts neither the ratio nor its weight changes: after a quiet hour one prompt does not decide alone.
    """

    __slots__ = ("_above", "_at_s", "_below", "_last", "value")

    def __init__(self) -> None:
        self.value: float | None = None
        """None: nothing was measured yet."""
        self._above = self._below = 0.0
        self._last = (0.0, 0.0)
        self._at_s: float | None = None

    def take(self, above: float, below: float, now_s: float) -> None:
        """Take the present totals."""
        since_s, self._at_s = self._at_s, now_s
        if (above, below) == self._last:
            return
        fade = 1.0 if since_s is None else math.exp(min(0.0, since_s - now_s) / SMOOTHING_S)
        self._above = self._above * fade + above - self._last[0]
        self._below = self._below * fade + below - self._last[1]
        self._last = (above, below)
        if self._below > WEIGHT_MIN:
            self.value = self._above / self._below
