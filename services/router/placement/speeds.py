"""How much slower or faster than the others each replica is.

Pure. The pool's costs are fitted over all prompts; a replica differs from them by one factor. The factor is the mean
logarithm of measured over expected seconds. A prompt counts as at most STEP_MAX away from the mean: a wild value hardly
moves it.

Two means are kept. The long mean, over LONG_PROMPTS, averages noise out and is the answer. The short mean, over
SHORT_PROMPTS, detects a change of the replica: where it differs from the long mean by more than noise explains, the long
mean starts again from the short one. With few prompts the factor is near 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

PRIOR_PROMPTS: Final = 8
"""Prompts for which it counts that a replica is usually like the others."""

SHORT_PROMPTS: Final = 24
LONG_PROMPTS: Final = 2048

STEP_MAX: Final = 0.5
"""Of a logarithm: what took 1.65 times the expected, or less than 1 / 1.65 of it, says no more."""

DEAD_ZONE: Final = 0.1
"""Of a logarithm: replicas that differ by less than this share are taken to be alike, else chance would make one of equals
the first choice of every request. From twice as much on all of a difference counts, between them a growing part."""

CHANGE_SPREADS: Final = 4.0
"""A short mean further from the long one than so many of its own standard deviations, and than DOUBT, is a change."""

SPREAD_START: Final = 0.2
"""Of a logarithm: mean distance of a prompt from its replica's mean, before it is known."""

SPREAD_PROMPTS: Final = 256
"""Prompts, of all replicas, over which that distance is taken."""

DEVIATION_PER_DISTANCE: Final = 1.25
"""Standard deviation over mean distance, of a normal distribution."""

CENTRE_EVERY: Final = 32
"""Prompts between two looks at what is usual: it changes slowly, and there may be a thousand replicas."""


@dataclass(slots=True)
class _Seen:
    """Logarithms of one replica's factor."""

    short: float = 0.0
    long: float = 0.0
    count: int = 0
    """Prompts since the long one started."""


class Speeds:
    """Learns the factors. 1: like the middle one of the replicas."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self.factors: dict[str, float] = {}
        """By what the pool's estimate is to be multiplied; not of those like all. To be read only."""
        self._spread = SPREAD_START
        self._centre = 0.0
        self._until_centre = 1

    def factor(self, replica: str) -> float:
        """Return by what the pool's estimate is to be multiplied."""
        return self.factors.get(replica, 1.0)

    def observe(self, replica: str, expected_s: float, seconds: float) -> None:
        """A prompt took `seconds` there; a usual replica would take `expected_s`."""
        if expected_s <= 0 or seconds <= 0:
            return
        seen = self._seen.get(replica)
        is_new = seen is None
        if seen is None:
            seen = self._seen[replica] = _Seen()
        log = math.log(seconds / expected_s)
        short_step = _clipped(log - seen.short)
        seen.short += short_step / min(SHORT_PROMPTS, PRIOR_PROMPTS + seen.count)
        # Half the count: the weight of the first prompts, which STEP_MAX held back, fades faster than 1 / count.
        seen.long += _clipped(log - seen.long) / min(LONG_PROMPTS, PRIOR_PROMPTS + seen.count / 2)
        seen.count += 1
        self._spread += (abs(short_step) - self._spread) / SPREAD_PROMPTS
        deviation = DEVIATION_PER_DISTANCE * self._spread / math.sqrt(2 * SHORT_PROMPTS)
        if abs(seen.short - seen.long) > max(DEAD_ZONE, CHANGE_SPREADS * deviation):
            seen.long, seen.count = seen.short, 0
        self._until_centre -= 1
        if self._until_centre <= 0 or is_new:
            self._recentre()
        else:
            self.factors[replica] = factor_of(seen.long - self._centre)

    def forget(self, replica: str) -> None:
        """The replica is gone."""
        self._seen.pop(replica, None)
        self.factors.pop(replica, None)

    def _recentre(self) -> None:
        """What all replicas have in common is the pool's cost, and not theirs."""
        logs = sorted(seen.long for seen in self._seen.values())
        middle = len(logs) // 2
        self._centre = logs[middle] if len(logs) % 2 else (logs[middle - 1] + logs[middle]) / 2
        self.factors = {name: factor_of(seen.long - self._centre) for name, seen in self._seen.items()}
        self._until_centre = max(CENTRE_EVERY, len(logs)) if len(logs) > 1 else 1


def _clipped(log_error: float) -> float:
    return max(-STEP_MAX, min(STEP_MAX, log_error))


def factor_of(log: float) -> float:
    """Return the factor of a logarithm: none below DOUBT, all of it from twice that on."""
    excess = min(1.0, max(0.0, abs(log) / DEAD_ZONE - 1.0))
    return math.exp(log * excess)
