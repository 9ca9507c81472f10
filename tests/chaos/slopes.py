"""Whether the memory of a process is flat, grows, or cannot be judged: a robust slope over the lives it had. Pure.

The slope is the median over pairs of samples (Theil 1950, Sen 1968): pairs of one life only, so that a process that is
started again, small, neither hides nor makes a slope; and not too far apart, so that a step up to a new high water, which
an allocator keeps, counts only where it is, while a leak is in every pair.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

WARM_S: Final = 120.0
"""Samples of a life younger than this do not count: imports, caches, allocators, and what is kept of ended streams."""

ENGINE_WARM_S: Final = 240.0
"""The same for an engine: at the load of a soak each of its blocks has been used once by then. What Redis keeps of a
request lives longer, eleven minutes, and counts as growth meanwhile: some 0.2 MB a minute."""

WATCHED_S_MIN: Final = 120.0
"""Less than this within all lives together says nothing."""

APART_S: Final = (45.0, 150.0)
"""Pairs that are closer say more of one sample's noise than of a slope."""

SLOPE_MAX: Final = 0.5
"""MB per minute that still are noise over the minutes of a soak; less in one that watches longer than LONG_S."""

LONG_S: Final = 1200.0

SHARE_MAX: Final = 0.02
"""Or growth, over the time that was looked at, of this share of the process's memory."""

Verdict = Literal["flat", "grows", "not judged"]
FLAT: Final = "flat"
GROWS: Final = "grows"
NOT_JUDGED: Final = "not judged"

BARS: Final = "▁▂▃▄▅▆▇█"


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """Memory of one process at one moment."""

    at_s: float
    life: int
    """Counts the starts of the process."""
    megabytes: float


class Slope(msgspec.Struct, frozen=True):
    """What the samples of one process say."""

    process: str
    lives: int
    watched_s: float
    """Time within lives that counted."""
    first_mb: float
    median_mb: float
    last_mb: float
    mb_per_min: float | None
    """None if no life was long enough to tell."""
    line: str
    """The samples over time as bars, from the smallest to the largest."""

    @property
    def verdict(self) -> Verdict:
        """What can be said. A process that was not watched long enough is not judged, and not flat."""
        if self.mb_per_min is None or self.watched_s < WATCHED_S_MIN:
            return NOT_JUDGED
        return FLAT if self.mb_per_min <= self.bound_mb_per_min else GROWS

    @property
    def bound_mb_per_min(self) -> float:
        """The slope from which on it is told from noise: a slower leak is not excluded. Infinite if nothing was watched."""
        if not self.watched_s:
            return math.inf
        of_noise = SLOPE_MAX * min(1.0, LONG_S / self.watched_s)
        return max(of_noise, SHARE_MAX * self.median_mb / (self.watched_s / 60))

    @property
    def kind(self) -> str:
        """Which program it runs: "decode-0-engine" and "decode-1-engine" are of one kind."""
        return "-".join(word for word in self.process.split("-") if not word.isdigit())


def warm_s(process: str) -> float:
    """Return how old a life of `process` must be before its samples count."""
    return ENGINE_WARM_S if process.endswith("-engine") else WARM_S


def slope_of(process: str, samples: Sequence[Sample]) -> Slope:
    """Return the slope of `samples`, at least one, in the order of time."""
    lives = {life: [one for one in samples if one.life == life] for life in {one.life for one in samples}}
    slopes: list[float] = []
    watched_s = 0.0
    for ones in lives.values():
        warm = [one for one in ones if one.at_s - ones[0].at_s >= warm_s(process)]
        if len(warm) > 1:
            watched_s += warm[-1].at_s - warm[0].at_s
        slopes += [
            60 * (late.megabytes - early.megabytes) / (late.at_s - early.at_s)
            for index, early in enumerate(warm)
            for late in warm[index + 1 :]
            if APART_S[0] <= late.at_s - early.at_s <= APART_S[1]
        ]
    sizes = [one.megabytes for one in samples]
    return Slope(
        process=process,
        lives=len(lives),
        watched_s=round(watched_s, 1),
        first_mb=round(sizes[0], 1),
        median_mb=round(statistics.median(sizes), 1),
        last_mb=round(sizes[-1], 1),
        mb_per_min=round(statistics.median(slopes), 3) if slopes else None,
        line=bars(sizes),
    )


def bars(values: Sequence[float], width: int = 40) -> str:
    """Return `values` as at most `width` bars, each the mean of its share of them."""
    count = min(width, len(values))
    means = [
        statistics.fmean(values[len(values) * index // count : len(values) * (index + 1) // count])
        for index in range(count)
    ]
    low, high = min(means), max(means)
    span = max(high - low, 1.0)  # one megabyte up and down is a flat line
    return "".join(BARS[min(len(BARS) - 1, int((value - low) / span * len(BARS)))] for value in means)
