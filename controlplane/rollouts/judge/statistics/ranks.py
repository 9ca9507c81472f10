"""Van Elteren's stratified rank test of a canary against a multiple of its comparison arm. Pure.

Within a stratum each value has the score "values certainly below it minus values certainly above it". Ties score 0. A
censored value, "at least c", is above every exact value up to c, and incomparable with all others (Gehan). The statistic
is the sum of the canary's scores, each stratum weighted by 1 / (values + 1). Its variance is that of a random assignment
of the same scores to the arms, so ties and censoring need no correction.

All strata are ranked at once: the key of a value is its logarithm plus an offset per stratum. A ratio then shifts the
keys of the comparison arm and leaves their order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from controlplane.rollouts.judge.statistics import normal

OFFSET: Final = 1_000.0
"""Distance between the keys of two strata, more than any logarithm and shift."""
ZERO_KEY: Final = -400.0
"""In place of the logarithm of 0. A ratio does not shift it."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sample:
    """One value per session of an arm. Values are finite and at least 0."""

    strata: Ints
    values: Floats
    is_censored: NDArray[np.bool_]
    """True: the value is a lower bound."""

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True)
class RankResult:
    """The result of one test. A large z says that the canary's values are higher."""

    z: float
    p: float
    """One-sided."""


class _Group:
    """Keys of one arm that are all exact or all censored, in order. Strata are numbered from 0."""

    def __init__(self, strata: Ints, values: Floats, number: int) -> None:
        is_positive = values > 0.0
        logs = np.log(values, out=np.full(len(values), ZERO_KEY), where=is_positive)
        keys = logs + OFFSET * strata
        order = np.argsort(keys, kind="stable")
        self.keys: Floats = keys[order]
        self.strata: Ints = strata[order]
        self.is_positive = is_positive[order].astype(np.float64)
        edges = np.searchsorted(self.strata, np.arange(number + 1))
        self.starts: Ints = edges[:-1]
        self.ends: Ints = edges[1:]

    def shifted(self, log_ratio: float) -> Floats:
        """Return the keys of the values times the ratio."""
        return self.keys + self.is_positive * log_ratio


class _Arm:
    """The exact and the censored values of an arm."""

    def __init__(self, sample: Sample, strata: Ints, number: int) -> None:
        late = sample.is_censored
        self.exact = _Group(strata[~late], sample.values[~late], number)
        self.censored = _Group(strata[late], sample.values[late], number)
        self.strata: Ints = np.concatenate((self.exact.strata, self.censored.strata))
        self.within = self.scores(self, 0.0, 0.0)

    def scores(self, other: _Arm, log_own: float, log_other: float) -> Floats:
        """Return by value of this arm: values of `other` certainly below it minus those certainly above it."""
        below, late = other.exact.shifted(log_other), other.censored.shifted(log_other)
        keys, strata = self.exact.shifted(log_own), self.exact.strata
        exact = np.searchsorted(below, keys, "left") - other.exact.starts[strata]
        exact -= other.exact.ends[strata] - np.searchsorted(below, keys, "right")
        exact -= other.censored.ends[strata] - np.searchsorted(late, keys, "left")
        keys, strata = self.censored.shifted(log_own), self.censored.strata
        censored = np.searchsorted(below, keys, "right") - other.exact.starts[strata]
        return np.concatenate((exact, censored)).astype(np.float64)


class RankComparison:
    """A canary's sample and that of its comparison arm, in the strata that both have."""

    def __init__(self, canary: Sample, other: Sample) -> None:
        self.strata: Ints = np.intersect1d(canary.strata, other.strata)
        number = len(self.strata)
        self._canary = self._arm(canary)
        self._other = self._arm(other)
        self.canary_counts: Ints = np.bincount(self._canary.strata, minlength=number)
        self.other_counts: Ints = np.bincount(self._other.strata, minlength=number)
        total = self.canary_counts + self.other_counts
        self._weights = 1.0 / (total + 1.0)
        self._variance = self._weights**2 * self.canary_counts * self.other_counts / (total * (total - 1.0))

    def _arm(self, sample: Sample) -> _Arm:
        is_common = np.isin(sample.strata, self.strata)
        kept = Sample(sample.strata[is_common], sample.values[is_common], sample.is_censored[is_common])
        return _Arm(kept, np.searchsorted(self.strata, kept.strata), len(self.strata))

    def balance(self, ratio: float) -> float:
        """Return the statistic for "canary against `ratio` x other". It falls with the ratio, and is 0 in expectation."""
        return self._weighted(self._canary.scores(self._other, 0.0, math.log(ratio)))

    def test(self, ratio: float) -> RankResult:
        """Test "the canary's values are higher than `ratio` times those of the other arm"."""
        shift = math.log(ratio)
        number = len(self.strata)
        cross = self._canary.scores(self._other, 0.0, shift)
        canary = self._canary.within + cross
        other = self._other.within + self._other.scores(self._canary, shift, 0.0)
        squares = np.bincount(self._canary.strata, canary**2, number)
        squares += np.bincount(self._other.strata, other**2, number)
        variance = float(np.dot(self._variance, squares))
        if variance <= 0.0:
            return RankResult(0.0, 1.0)
        z = self._weighted(cross) / math.sqrt(variance)
        return RankResult(z, normal.upper_tail(z))

    def _weighted(self, scores: Floats) -> float:
        """Return the weighted sum of the canary's scores. Sums of a stratum are exact, so equal arms give exactly 0."""
        return float(np.dot(np.bincount(self._canary.strata, scores, len(self.strata)), self._weights))
