"""Tail and quantile of the normal distribution. Pure."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final

STANDARD: Final = NormalDist()


def upper_tail(z: float) -> float:
    """Return P(Z >= z), accurate also far out in the tail."""
    return 0.5 * math.erfc(z / math.sqrt(2.0))


def quantile(confidence: float) -> float:
    """Return z with P(Z <= z) = `confidence`."""
    return STANDARD.inv_cdf(confidence)
