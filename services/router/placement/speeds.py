"""Speed factors of prefill replicas relative to the others.

Pure. The pool's cost model is fitted over all prompts. A replica differs from it by one factor, the mean logarithm of
measured over expected seconds. A prompt counts as at most STEP_MAX away from the mean, so that an outlier hardly moves it.

Two means are kept. The long mean, over LONG_PROMPTS, averages out noise and is the answer. The short mean, over
SHORT_PROMPTS, detects a change of the replica. Where the two differ by more than noise explains, the long mean restarts
from the short one. With few prompts the factor is near 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

PRIOR_PROMPTS: Final = 8
"""Prompts for which the prior counts: a replica is usually like the others."""

SHORT_PROMPTS: Final = 24
LONG_PROMPTS: Final = 2048

STEP_MAX: Final = 0.5
"""Bound on the distance of a logarithm from its mean: a prompt counts as at most 1.65 times as long, or as short."""

DEAD_ZONE: Final = 0.1
"""Dead zone of a logarithm. Replicas that differ by less count as equal. Otherwise chance would make one of equal replicas
the first choice of every request. From twice this difference on the whole difference counts; between the two, a growing
part."""

CHANGE_SPREADS: Final = 4.0
"""A change is detected if the means differ by more than this many standard deviations of the short mean, and than
DEAD_ZONE."""

SPREAD_START: Final = 0.2
"""Start value, in logarithms, of the mean distance of a prompt from its replica's mean."""

SPREAD_PROMPTS: Final = 256
"""Prompts, of all replicas, over which that distance is averaged."""

DEVIATION_PER_DISTANCE: Final = 1.25
"""Standard deviation over mean distance, of a normal distribution."""

CENTRE_EVERY: Final = 32
"""Prompts between two updates of the centre. It changes slowly, and there may be a thousand replicas."""


@dataclass(slots=True)
class _Seen:
    """Logarithms of one replica's factor."""

    short: float = 0.0
    long: float = 0.0
    count: int = 0
    """Prompts since the long mean started."""


class Speeds:
    """Learns the factors. 1: like the median of the replicas."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self.factors: dict[str, float] = {}
        """Factors on the pool's estimate, by replica; absent: 1. Read-only for callers."""
        self._spread = SPREAD_START
        self._centre = 0.0
        self._until_centre = 1

    def factor(self, replica: str) -> float:
        """Return the factor on the pool's estimate."""
        return self.factors.get(replica, 1.0)

    def observe(self, replica: str, expected_s: float, seconds: float) -> None:
        """Record that a prompt took `seconds` at `replica`, and would take `expected_s` at a usual one."""
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
        """Forget a lost replica."""
        self._seen.pop(replica, None)
        self.factors.pop(replica, None)

    def _recentre(self) -> None:
        """Subtract the median of all replicas: the common part belongs to the pool's cost model."""
        logs = sorted(seen.long for seen in self._seen.values())
        middle = len(logs) // 2
        self._centre = logs[middle] if len(logs) % 2 else (logs[middle - 1] + logs[middle]) / 2
        self.factors = {name: factor_of(seen.long - self._centre) for name, seen in self._seen.items()}
        self._until_centre = max(CENTRE_EVERY, len(logs)) if len(logs) > 1 else 1


def _clipped(log_error: float) -> float:
    return max(-STEP_MAX, min(STEP_MAX, log_error))


def factor_of(log: float) -> float:
    """Return the factor of a logarithm: 1 below DEAD_ZONE, the whole logarithm from twice that on."""
    excess = min(1.0, max(0.0, abs(log) / DEAD_ZONE - 1.0))
    return math.exp(log * excess)
