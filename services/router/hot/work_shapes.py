"""Shapes of the work: uncached tokens of prompts, and batches of decode replicas, in powers of two. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from services.router.hot.decay import DecayedCount

POWERS: Final = 32
"""Powers of two from 1 to 2^31, the greatest one in 32 bits."""

WEIGHT_MIN: Final = 0.01
"""A shape of a lower weight is left out."""


class Shape(NamedTuple):
    """A shape with the decayed number of its requests. Of `prompt_tokens` and `batch` one is 0."""

    prompt_tokens: int
    batch: int
    weight: float


class WorkShapes:
    """Decayed counts of requests by shape. A number between two powers of two counts for the higher one."""

    def __init__(self) -> None:
        self._prompts = [DecayedCount() for _ in range(POWERS)]
        self._batches = [DecayedCount() for _ in range(POWERS)]

    def add(self, uncached_tokens: int, batch: int, now_s: float) -> None:
        """Count a request with `uncached_tokens` to compute, one of `batch` requests at its decode replica. O(1).

        Both count as 1 if they are less, and as 2^31 if they are more.
        """
        power = (uncached_tokens - 1).bit_length() if uncached_tokens > 1 else 0
        self._prompts[power if power < POWERS else POWERS - 1].add(now_s)
        power = (batch - 1).bit_length() if batch > 1 else 0
        self._batches[power if power < POWERS else POWERS - 1].add(now_s)

    def ranked(self, now_s: float) -> Sequence[Shape]:
        """Return the shapes with a weight of at least WEIGHT_MIN, the heaviest first."""
        prompts = [Shape(1 << at, 0, each.weight(now_s)) for at, each in enumerate(self._prompts)]
        batches = [Shape(0, 1 << at, each.weight(now_s)) for at, each in enumerate(self._batches)]
        found = [each for each in (*prompts, *batches) if each.weight >= WEIGHT_MIN]
        return sorted(found, key=lambda each: -each.weight)
