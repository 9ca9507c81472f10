"""How much slower or faster than the others each replica is.

Pure. The pool's costs are fitted over all prompts; a replica differs from them by one factor. It is the mean logarithm of
measured over expected seconds, where what is far from it counts as only STEP_MAX away: a wild value hardly moves it, and a
replica that became slow is known after some tens of prompts. Few prompts: near 1.
"""

from __future__ import annotations

import math
from typing import Final

PRIOR_PROMPTS: Final = 8
"""Prompts for which it counts that a replica is usually like the others."""

MEMORY_PROMPTS: Final = 24
STEP_MAX: Final = 0.5
"""Of a logarithm: what took 1.65 times the expected, or less than 1 / 1.65 of it, says no more."""

DOUBT: Final = 0.1
"""Of a logarithm: replicas that differ by less than this share are taken to be alike, else chance would make one of equals
everybody's first choice."""

CENTRE_EVERY: Final = 32
"""Prompts between two looks at what is usual: it changes slowly, and there may be a thousand replicas."""


class Speeds:
    """Learns the factors. 1: like the middle one of the replicas."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, int]] = {}
        """Name -> logarithm of the factor, prompts."""
        self.factors: dict[str, float] = {}
        """By what the pool's estimate is to be multiplied; not of those like all. To be read only."""
        self._centre = 0.0
        self._until_centre = 1

    def factor(self, replica: str) -> float:
        """Return by what the pool's estimate is to be multiplied."""
        return self.factors.get(replica, 1.0)

    def observe(self, replica: str, expected_s: float, seconds: float) -> None:
        """A prompt took `seconds` there; a usual replica would take `expected_s`."""
        if expected_s <= 0 or seconds <= 0:
            return
        log, count = self._seen.get(replica, (0.0, 0))
        surprise = math.log(seconds / expected_s) - log
        surprise = max(-STEP_MAX, min(STEP_MAX, surprise))
        log += surprise / min(MEMORY_PROMPTS, PRIOR_PROMPTS + count)
        self._seen[replica] = (log, count + 1)
        self._until_centre -= 1
        if self._until_centre <= 0 or count == 0:
            self._centre_again()
        else:
            self.factors[replica] = factor_of(log - self._centre)

    def forget(self, replica: str) -> None:
        """The replica is gone."""
        self._seen.pop(replica, None)
        self.factors.pop(replica, None)

    def _centre_again(self) -> None:
        """What all replicas have in common is the pool's cost, and not theirs."""
        logs = sorted(log for log, _ in self._seen.values())
        middle = len(logs) // 2
        self._centre = logs[middle] if len(logs) % 2 else (logs[middle - 1] + logs[middle]) / 2
        self.factors = {name: factor_of(log - self._centre) for name, (log, _) in self._seen.items()}
        self._until_centre = max(CENTRE_EVERY, len(logs)) if len(logs) > 1 else 1


def factor_of(log: float) -> float:
    """Return the factor of a logarithm; what is less than DOUBT is none."""
    return math.exp(math.copysign(max(0.0, abs(log) - DOUBT), log))
