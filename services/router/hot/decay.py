"""Decayed counts: an event of the age t counts exp(-t / DECAY_S). Pure."""

from __future__ import annotations

from math import exp
from typing import Final

DECAY_S: Final = 120.0
"""Age at which an event counts 1 / e."""


def decayed(weight: float, age_s: float) -> float:
    """Return `weight` after `age_s` more seconds. A negative age counts as 0."""
    return weight * exp(-age_s / DECAY_S) if age_s > 0 else weight


class DecayedCount:
    """A count of events, each decayed by its age."""

    __slots__ = ("_at_s", "_weight")

    def __init__(self) -> None:
        self._weight = 0.0
        self._at_s = 0.0

    def add(self, now_s: float) -> None:
        """Count an event at `now_s`. Times must not descend."""
        self._weight = self._weight * exp((self._at_s - now_s) / DECAY_S) + 1.0
        self._at_s = now_s

    def weight(self, now_s: float) -> float:
        """Return the count at `now_s`."""
        return decayed(self._weight, now_s - self._at_s)
