"""Capacity planning: finds how many prefill replicas a trace needs at its own rate for a goodput. Pure.

Goodput grows with the number of replicas, except for noise. The search raises the number until it suffices, then bisects.
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
    """Proposes one number of replicas at a time until the smallest sufficient number is known."""

    goodput: float
    first: int
    """First number to try. Fewer replicas cannot do the work."""
    tried: dict[int, Measures] = field(default_factory=dict)

    def next(self) -> int | None:
        """Return the number to try. None: the search has ended, or not even REPLICAS_MAX are enough."""
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
        """Return the smallest number of replicas with enough goodput so far; None: none was enough."""
        return min(
            (count for count, seen in self.tried.items() if seen.goodput >= self.goodput), default=None
        )

    @property
    def measures(self) -> Measures | None:
        """Return the measures of `found` replicas."""
        return self.tried[self.found] if self.found is not None else None

    @property
    def goodput_with_one_less(self) -> float | None:
        """Return the goodput of one replica less than `found`; None if no replica would be left, or none is found."""
        less = self.tried.get(self.found - 1) if self.found is not None else None
        return less.goodput if less is not None else None
