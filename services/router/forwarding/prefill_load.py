"""Prefill work of the last minute, as a router reports it to the control plane. Pure.

The owner samples running totals; the difference of two samples over their time is a rate. So requests cost three additions
each, and the work without any cache follows from the present cost model: c0 n + a sum(T) + b sum(T^2) / 2 seconds for n
prompts of T tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 60.0

SPAN_MIN_S: Final = 5.0
"""Time between two samples below which no rate is given."""


@dataclass(slots=True)
class ArrivedPrompts:
    """Running totals of the prompts that arrived."""

    count: int = 0
    tokens: int = 0
    tokens_squared: int = 0

    def add(self, tokens: int) -> None:
        """Count a prompt."""
        self.count += 1
        self.tokens += tokens
        self.tokens_squared += tokens * tokens


@dataclass(frozen=True, slots=True)
class Sample:
    """The totals at one time."""

    at_s: float
    prompts: tuple[int, int, int]
    """Count, tokens, squared tokens."""
    measured_s: float
    """Prefill seconds that replicas reported."""


class PrefillLoad:
    """The samples of the last WINDOW_S, one a second at most."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()

    def take(self, prompts: ArrivedPrompts, measured_s: float, now_s: float) -> None:
        """Take the present totals."""
        samples = self._samples
        if samples and now_s - samples[-1].at_s < 1.0:
            return
        totals = (prompts.count, prompts.tokens, prompts.tokens_squared)
        samples.append(Sample(now_s, totals, measured_s))
        while len(samples) > 2 and now_s - samples[1].at_s >= WINDOW_S:
            samples.popleft()

    def measured_per_s(self) -> float:
        """Return the prefill seconds per second that replicas did; 0: unknown."""
        span_s = self._span_s()
        return (self._samples[-1].measured_s - self._samples[0].measured_s) / span_s if span_s else 0.0

    def uncached_per_s(self, coefficients: tuple[float, float, float]) -> float:
        """Return the prefill seconds per second of all prompts that arrived, without any cache; 0: unknown, or none."""
        span_s = self._span_s()
        if not span_s:
            return 0.0
        pairs = zip(self._samples[-1].prompts, self._samples[0].prompts, strict=True)
        count, tokens, squared = (last - first for last, first in pairs)
        c0, a, b = coefficients
        return (c0 * count + a * tokens + b * squared / 2) / span_s

    def _span_s(self) -> float:
        """Return the time between the first and the last sample; 0 if it is too short."""
        if len(self._samples) < 2:
            return 0.0
        span_s = self._samples[-1].at_s - self._samples[0].at_s
        return span_s if span_s >= SPAN_MIN_S else 0.0
