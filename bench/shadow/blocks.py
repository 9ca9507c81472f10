"""Blocks of load with and without a shadow, and the ratio of their latencies. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bench.results import quantile

CONFIDENCE: Final = 0.95
TAIL: Final = 0.99


@dataclass(frozen=True, slots=True)
class Block:
    """One block of load."""

    is_on: bool
    """True: a shadow copied every session to a target that never answers."""
    latencies_s: tuple[float, ...]
    """From the time at which each request was due to its end."""
    first_tokens_s: tuple[float, ...]
    errors: int
    frontend_cpu: float
    """CPU seconds of the frontends per second."""
    copies: float
    """Requests that were copied in the block."""

    @property
    def p99_s(self) -> float:
        """99th percentile of the latency."""
        return quantile(self.latencies_s, TAIL)

    @property
    def ttft_p99_s(self) -> float:
        """99th percentile of the time to first token."""
        return quantile(self.first_tokens_s, TAIL)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio on / off with the upper bound of its 95 % confidence interval, one-sided."""

    value: float
    upper: float


def order(count: int) -> list[bool]:
    """Return on or off for `count` blocks, an even number: pairs in alternating order, so that a drift cancels."""
    return [at % 4 in (0, 3) for at in range(count)]


def pairs(blocks: Sequence[Block]) -> list[tuple[Block, Block]]:
    """Return each pair of neighbours as (on, off)."""
    found = []
    for one, other in zip(blocks[::2], blocks[1::2], strict=True):
        found.append((one, other) if one.is_on else (other, one))
    return found


def ratio(values: Sequence[tuple[float, float]]) -> Ratio:
    """Return the geometric mean of on / off over pairs, and its upper bound by the t distribution of the logarithms."""
    logs = [math.log(on / off) for on, off in values]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(mean), math.inf)
    spread = statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean + t_quantile(CONFIDENCE, len(logs) - 1) * spread))


def t_quantile(confidence: float, freedom: int) -> float:
    """Return the quantile of Student's t (Cornish-Fisher), to within 1 % from four degrees of freedom on."""
    z = statistics.NormalDist().inv_cdf(confidence)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
