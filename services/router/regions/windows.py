"""Rates over the last ten seconds, as differences of running totals. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

WINDOW_S: Final = 10.0

SAMPLE_S: Final = 0.9
"""Time between two samples, a little less than that of two reports."""

SPAN_MIN_S: Final = 3.0
"""Time between the first and the last sample below which no rate is given."""


class Windows:
    """Samples of named totals. A total that a sample lacks began at 0 after it."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Mapping[str, float]]] = deque()

    def is_due(self, now_s: float) -> bool:
        """True if the last sample is old enough for another one."""
        return not self._samples or now_s - self._samples[-1][0] >= SAMPLE_S

    def add(self, totals: Mapping[str, float], now_s: float) -> None:
        """Add the present totals. The caller does not change them any more."""
        samples = self._samples
        samples.append((now_s, totals))
        while len(samples) > 2 and now_s - samples[1][0] >= WINDOW_S:
            samples.popleft()

    def per_s(self, name: str) -> float:
        """Return the rate of a total, at least 0; 0 while the samples span too little time."""
        if not self._samples:
            return 0.0
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        span_s = last_s - first_s
        if span_s < SPAN_MIN_S:
            return 0.0
        return max(0.0, last.get(name, 0.0) - first.get(name, 0.0)) / span_s
