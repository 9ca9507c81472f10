"""How many prefill replicas a trace needs, at its own rate, for a share of first tokens in time. Pure.

Goodput grows with the number of replicas but for noise: the smallest number is found by doubling, then by halving.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from simulator.measures import Measures

REPLICAS_MAX: Final = 1024
GROWTH: Final = 1.5


@dataclass(slots=True)
class Search:
    """Asks for one number of replicas at a time until the smallest sufficient one is known."""

    goodput: float
    first: int
    """Where to begin: less work than that many replicas can do is not there."""
    tried: dict[int, Measures] = field(default_factory=dict)

    def next(self) -> int | None:
        """Return the number to try, or None: it is found, or not even REPLICAS_MAX are enough."""
        bad = max((count for count, seen in self.tried.items() if seen.goodput < self.goodput), default=0)
        good = self.found
        if good is None:
            if bad >= REPLICAS_MAX:
                return None
            return min(REPLICAS_MAX, max(self.first, math.ceil(bad * GROWTH)))
        bad = max((count for count in self.tried if count < good), default=0)
        return None if good - bad <= 1 else (good + bad) // 2

    @property
    def found(self) -> int | None:
        """Return the smallest number that was enough."""
        return min(
            (count for count, seen in self.tried.items() if seen.goodput >= self.goodput), default=None
        )

    @property
    def measures(self) -> Measures | None:
        """Return how that number did."""
        return self.tried[self.found] if self.found is not None else None

    @property
    def goodput_with_one_less(self) -> float | None:
        """Return what one replica less than `found` gives; None if none would be left, or nothing is found."""
        less = self.tried.get(self.found - 1) if self.found is not None else None
        return less.goodput if less is not None else None
