"""Lost capacity after a restart: goodput over time, the end of the loss, and the spread over repeats. Pure.

Goodput is a list of tokens per bin of BIN_S. A share is the goodput of a bin over the steady rate.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from bench.results import BenchError

BIN_S: Final = 0.25
STABLE_S: Final = 30.0
"""The loss ends at the begin of the first window of this length with goodput within TOLERANCE of steady."""
OPENING_S: Final = 5.0
"""The first seconds of that window must be within TOLERANCE, too: a later backlog does not make up for them."""
TOLERANCE: Final = 0.02
DRAWS: Final = 10_000
CONFIDENCE: Final = 0.95


def bin_of(at_s: float) -> int:
    """Return the number of the bin of a time."""
    return math.floor(at_s / BIN_S)


def rate_per_s(bins: Mapping[int, int], from_s: float, to_s: float) -> float:
    """Return the mean tokens per second over the whole bins between two times. Raises BenchError if there is none."""
    first, end = math.ceil(from_s / BIN_S), bin_of(to_s)
    if end <= first:
        raise BenchError(f"no bin of {BIN_S:g} s between {from_s:.2f} and {to_s:.2f} s")
    return sum(bins.get(at, 0) for at in range(first, end)) / ((end - first) * BIN_S)


def shares(bins: Mapping[int, int], from_s: float, to_s: float, steady_per_s: float) -> list[float]:
    """Return the share of each whole bin between two times. Raises BenchError without a steady rate."""
    if steady_per_s <= 0.0:
        raise BenchError("the steady rate is 0")
    first, end = math.ceil(from_s / BIN_S), bin_of(to_s)
    return [bins.get(at, 0) / (steady_per_s * BIN_S) for at in range(first, end)]


def recovered_at(found: Sequence[float]) -> int | None:
    """Return the first bin from which the mean shares over STABLE_S and over OPENING_S are at least 1 - TOLERANCE.

    None: there is no such window.
    """
    width, opening = round(STABLE_S / BIN_S), round(OPENING_S / BIN_S)
    for begin in range(len(found) - width + 1):
        windows = found[begin : begin + opening], found[begin : begin + width]
        if all(statistics.fmean(window) >= 1.0 - TOLERANCE - 1e-9 for window in windows):
            return begin
    return None


def lost_replica_s(found: Sequence[float], replicas: int) -> float:
    """Return the integral of (1 - share) over the bins, in replica-seconds. Goodput above steady makes it smaller."""
    return sum(1.0 - share for share in found) * BIN_S * replicas


def smoothed(found: Sequence[float], width: int) -> list[float]:
    """Return the mean of up to `width` bins around each bin."""
    half = width // 2
    return [statistics.fmean(found[max(0, at - half) : at + half + 1]) for at in range(len(found))]


def saved(none: Sequence[float], arm: Sequence[float], seed: int = 1) -> tuple[float, float, float]:
    """Return the share of the loss that an arm saves, and its bootstrap interval: 1 - mean(arm) / mean(none).

    The interval is the percentile bootstrap (Efron 1979) of CONFIDENCE over DRAWS redraws of the repeats of both arms.
    Raises BenchError if an arm has no repeat, or if the mean loss of `none` is not above 0.
    """
    if not none or not arm or statistics.fmean(none) <= 0.0:
        raise BenchError("a saved share needs repeats of both arms, and a loss without warm-up")
    draw, found = random.Random(seed), list[float]()
    while len(found) < DRAWS:
        base = statistics.fmean(draw.choices(none, k=len(none)))
        other = statistics.fmean(draw.choices(arm, k=len(arm)))
        found.append(1.0 - other / base if base > 0.0 else -math.inf)
    found.sort()
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = found[int(tail * DRAWS)], found[int((1.0 - tail) * DRAWS) - 1]
    return 1.0 - statistics.fmean(arm) / statistics.fmean(none), low, high
