"""How many tokens a replica computes in a second, by the prompts of the last minute. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

SMOOTHING_S: Final = 60.0
"""Time in which the weight of a measurement falls to 1/e."""

PROMPTS_MIN: Final = 8
"""Prompts below which no rate is given: the first ones of a cold engine take many times as long."""

WEIGHT_MIN: Final = 1e-9
"""Weight, in seconds, below which old sums are too small to divide. The ratio is then kept as it is."""


@dataclass(slots=True)
class ComputedPrompts:
    """Running totals of computed prompts."""

    count: int = 0
    """Prompts with a measured time."""
    timed_tokens: int = 0
    """Computed tokens of these."""
    seconds: float = 0.0
    """Seconds that replicas spent on them alone."""
    tokens: int = 0
    """Computed tokens of all prompts."""

    def add(self, tokens: int, seconds: float) -> None:
        """Count a prompt. `seconds` of 0: not measured."""
        self.tokens += tokens
        if seconds > 0:
            self.count += 1
            self.timed_tokens += tokens
            self.seconds += seconds


@dataclass(slots=True)
class ComputedByRole:
    """Prompts that prefill replicas computed, and those that decode replicas ran beside their streams (`local`)."""

    prefill: ComputedPrompts = field(default_factory=ComputedPrompts)
    local: ComputedPrompts = field(default_factory=ComputedPrompts)


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
