"""The ratio of a canary's values to those of its comparison arm: Hodges-Lehmann estimate and upper bound. Pure.

Both invert the rank test. The estimate is the ratio at which the statistic is 0. Without strata and censoring it is the
median of all ratios of a canary's value to another arm's. The upper bound is the least ratio that a one-sided test
rejects.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from controlplane.rollouts.judge.statistics import normal
from controlplane.rollouts.judge.statistics.ranks import RankComparison

LOG_MAX: Final = 4.0
"""Ratios from exp(-4) to exp(4) are searched."""
TOLERANCE: Final = 1e-3
"""Of the logarithm of a ratio."""


def hodges_lehmann(comparison: RankComparison, tolerance: float = TOLERANCE) -> float | None:
    """Return the estimate of the ratio; None without a common stratum."""
    if len(comparison.strata) == 0:
        return None
    low = _root(lambda log: comparison.balance(math.exp(log)) > 0.0, tolerance)
    high = _root(lambda log: comparison.balance(math.exp(log)) >= 0.0, tolerance)
    return math.exp((low + high) / 2.0)


def ratio_upper(comparison: RankComparison, confidence: float, tolerance: float = TOLERANCE) -> float | None:
    """Return the upper bound of the ratio; None if the samples give none below exp(4)."""
    if len(comparison.strata) == 0:
        return None
    limit = -normal.quantile(confidence)
    log = _root(lambda log: comparison.test(math.exp(log)).z > limit, tolerance)
    return None if log > LOG_MAX - 2.0 * tolerance else math.exp(log)


def _root(is_below: Callable[[float], bool], tolerance: float) -> float:
    """Return the logarithm at which `is_below` turns from true to false."""
    low, high = -LOG_MAX, LOG_MAX
    while high - low > tolerance:
        middle = (low + high) / 2.0
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return high
