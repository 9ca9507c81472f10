"""Judges the memory of a process as flat, growing, or not judged, by a robust slope over its lives. Pure.

The slope is the median over pairs of samples (Theil 1950, Sen 1968). A pair is of one life, so the restart of a process
neither hides nor makes a slope. A pair is not too far apart: a step to a new high-water mark, which an allocator keeps,
counts in the pairs around it only. A leak is in every pair.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final, Literal

import msgspec


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of the observation, and the growth that counts as noise."""

    warm_s: float
    """Samples of a younger life do not count: imports, caches, allocators and records of ended streams still fill."""
    engine_warm_s: float
    """The same for an engine: at the load of a soak, each of its blocks has been used once by then."""
    apart_s: tuple[float, float]
    """Distances of a pair of samples: closer ones reflect the noise of a sample more than a slope."""
    slope_max: float
    """Growth in MB per minute that counts as noise."""
    ends_share: float
    """Share of the soak in which faults may end a part; later lives are long."""

    def warm_of(self, process: str) -> float:
        """Return the age from which on samples of a life of `process` count."""
        return self.engine_warm_s if process.endswith("-engine") else self.warm_s


USUAL: Final = Watch(warm_s=120.0, engine_warm_s=240.0, apart_s=(45.0, 150.0), slope_max=0.5, ends_share=1.0)
"""For a soak of minutes: 720 MB a day. Redis keeps its record of a request for eleven minutes, which counts as growth
of some 0.2 MB a minute."""

MINUTES_OF_A_DAY: Final = 1440

HOUR: Final = Watch(
    warm_s=720.0,
    engine_warm_s=720.0,
    apart_s=(300.0, 900.0),
    slope_max=200 / MINUTES_OF_A_DAY,
    ends_share=1 / 3,
)
"""For a soak of an hour or more: 200 MB a day. A life counts after the eleven minutes for which Redis keeps a request."""

HOUR_MIN: Final = 60.0

WATCHED_S_MIN: Final = 120.0
"""Shortest time within all lives together for a verdict."""


def watch_of(minutes: float) -> Watch:
    """Return the observation of a soak of `minutes`."""
    return HOUR if minutes >= HOUR_MIN else USUAL


SHARE_MAX: Final = 0.02
"""Growth over the watched time that counts as noise, as a share of the process's memory."""

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
    """Verdict on the samples of one process."""

    process: str
    lives: int
    watched_s: float
    """Counted time within lives."""
    first_mb: float
    median_mb: float
    last_mb: float
    mb_per_min: float | None
    """None if no life was long enough."""
    line: str
    """The samples over time as bars, from the smallest to the largest."""
    slope_max: float = USUAL.slope_max
    """Growth that counts as noise, of the observation."""

    @property
    def verdict(self) -> Verdict:
        """The verdict. A process that was not watched long enough is not judged, rather than flat."""
        if self.mb_per_min is None or self.watched_s < WATCHED_S_MIN:
            return NOT_JUDGED
        return FLAT if self.mb_per_min <= self.bound_mb_per_min else GROWS

    @property
    def bound_mb_per_min(self) -> float:
        """The smallest slope that differs from noise: a slower leak is not excluded. Infinite without watched time."""
        if not self.watched_s:
            return math.inf
        return max(self.slope_max, SHARE_MAX * self.median_mb / (self.watched_s / 60))

    @property
    def kind(self) -> str:
        """The program of the process: "decode-0-engine" and "decode-1-engine" are of one kind."""
        return "-".join(word for word in self.process.split("-") if not word.isdigit())


def slope_of(process: str, samples: Sequence[Sample], watch: Watch = USUAL) -> Slope:
    """Return the slope of `samples`, at least one, in the order of time."""
    nearest_s, farthest_s = watch.apart_s
    lives = {life: [one for one in samples if one.life == life] for life in {one.life for one in samples}}
    slopes: list[float] = []
    watched_s = 0.0
    for ones in lives.values():
        warm = [one for one in ones if one.at_s - ones[0].at_s >= watch.warm_of(process)]
        if len(warm) > 1:
            watched_s += warm[-1].at_s - warm[0].at_s
        slopes += [
            60 * (late.megabytes - early.megabytes) / (late.at_s - early.at_s)
            for index, early in enumerate(warm)
            for late in warm[index + 1 :]
            if nearest_s <= late.at_s - early.at_s <= farthest_s
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
        slope_max=watch.slope_max,
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
