"""Exact tests and bounds for proportions: binomial tails by the incomplete beta function. Pure.

A test of two proportions is conditional on the total of both arms: under equal rates, the successes of one arm are
binomial with the arm's share of the samples. For one success at most per sample the true distribution is hypergeometric,
which is narrower, so the test never rejects too often.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

ITERATIONS_MAX: Final = 10_000
"""Terms of the continued fraction. About 5 * sqrt(samples) are needed."""
TINY: Final = 1e-300
PRECISION: Final = 1e-15
BISECTIONS: Final = 60
OTHER_ARM_PART: Final = 0.1
"""Part of the error probability of `difference_upper` that the bound of the comparison arm takes."""


def upper_tail(successes: int, samples: int, share: float) -> float:
    """Return P(X >= successes) for X binomial(samples, share)."""
    if successes <= 0:
        return 1.0
    if successes > samples:
        return 0.0
    return incomplete_beta(successes, samples - successes + 1, share)


def lower_tail(successes: int, samples: int, share: float) -> float:
    """Return P(X <= successes) for X binomial(samples, share)."""
    if successes >= samples:
        return 1.0
    if successes < 0:
        return 0.0
    return incomplete_beta(samples - successes, successes + 1, 1.0 - share)


def share_p(canary: int, canary_samples: int, other: int, other_samples: int) -> float:
    """Return the one-sided p of "the canary's rate is higher", conditional on the total. 1 without samples in an arm."""
    if canary_samples <= 0 or other_samples <= 0:
        return 1.0
    return upper_tail(canary, canary + other, canary_samples / (canary_samples + other_samples))


def share_upper(successes: int, samples: int, error: float) -> float:
    """Return the upper Clopper-Pearson bound of a proportion, with one-sided error probability `error`."""
    if samples <= 0 or successes >= samples:
        return 1.0
    return _root(lambda share: lower_tail(successes, samples, share) > error)


def share_lower(successes: int, samples: int, error: float) -> float:
    """Return the lower Clopper-Pearson bound of a proportion, with one-sided error probability `error`."""
    if samples <= 0 or successes <= 0:
        return 0.0
    return _root(lambda share: upper_tail(successes, samples, share) < error)


def difference_upper(
    canary: int, canary_samples: int, other: int, other_samples: int, confidence: float
) -> float:
    """Return an upper bound of the canary's rate minus the other rate, at least with `confidence`.

    Upper bound of the one minus lower bound of the other. The error probability is split 9 to 1, because the canary has
    fewer samples. By Bonferroni's inequality the bound holds for every pair of rates.
    """
    error = 1.0 - confidence
    upper = share_upper(canary, canary_samples, error * (1.0 - OTHER_ARM_PART))
    return upper - share_lower(other, other_samples, error * OTHER_ARM_PART)


def samples_without(share: float, confidence: float) -> int:
    """Return the samples without an event after which `difference_upper` is below `share`, the other arm without events."""
    error = (1.0 - confidence) * (1.0 - OTHER_ARM_PART)
    return math.ceil(math.log(error) / math.log1p(-share))


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b) for a, b > 0."""
    if x <= 0.0:
        return 0.0
    if x >= 1.0:
        return 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    if x < (a + 1.0) / (a + b + 2.0):
        return math.exp(log_front) * _continued_fraction(a, b, x) / a
    return 1.0 - math.exp(log_front) * _continued_fraction(b, a, 1.0 - x) / b


def _continued_fraction(a: float, b: float, x: float) -> float:
    """Evaluate the continued fraction of the incomplete beta function by Lentz's method."""
    c, d = 1.0, 1.0 / _away_from_zero(1.0 - (a + b) * x / (a + 1.0))
    result = d
    for m in range(1, ITERATIONS_MAX):
        even = m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0))
        for numerator in (even, odd):
            d = 1.0 / _away_from_zero(1.0 + numerator * d)
            c = _away_from_zero(1.0 + numerator / c)
            result *= c * d
        if abs(c * d - 1.0) < PRECISION:
            break
    return result


def _away_from_zero(value: float) -> float:
    return value if abs(value) > TINY else TINY


def _root(is_below: Callable[[float], bool]) -> float:
    """Return the share at which `is_below` turns from true to false."""
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return high
