"""TTFT of the first requests at a fresh replica, beside steady requests of the same uncached size. Pure.

Requests are compared within buckets of uncached prompt tokens. A bucket with few steady requests borrows those of the
nearest bucket that has enough. The engine's own cost of the difference in size is then added.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from bench.results import BenchError, quantile

BUCKETS: Final = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Upper ends of the buckets in tokens, exclusive. The last bucket is open."""
FIRST: Final = 50
"""Requests at the fresh replica that are compared."""
SAMPLES_MIN: Final = 10
"""Steady requests that make a bucket."""
QUANTILE: Final = 0.95


class Call(NamedTuple):
    """One request of a client. Times are of the machine's monotonic clock."""

    sent_s: float
    first_s: float | None
    """Time of the first token; None: there was none."""
    ended_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    prefill: str
    """Replica of the last attempt; empty: unknown."""
    decode: str
    queue_s: float
    """Wait of the last attempt in the router's queue."""
    error: str
    """Empty: none."""

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens that prefill computed."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def ttft_s(self) -> float:
        """Time to the first token; of a call without one, to its end."""
        return (self.ended_s if self.first_s is None else self.first_s) - self.sent_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """The first requests at a fresh replica."""

    requests: int
    p95_s: float
    steady_p95_s: float
    """p95 of steady requests, with the mix of buckets of the first ones."""
    borrowed: int
    """First requests in a bucket without enough steady requests."""

    @property
    def ratio(self) -> float:
        """p95 over that of steady requests."""
        return self.p95_s / self.steady_p95_s


def compare(steady: Iterable[Call], first: Sequence[Call], token_s: float) -> Comparison:
    """Compare at most FIRST requests of `first`. `token_s`: the engine's cost of an uncached token.

    Raises BenchError if there is no first request, or no bucket with SAMPLES_MIN steady ones.
    """
    chosen = first[:FIRST]
    samples: dict[int, list[Call]] = {}
    for call in steady:
        samples.setdefault(bucket_of(call.uncached_tokens), []).append(call)
    full = sorted(bucket for bucket, calls in samples.items() if len(calls) >= SAMPLES_MIN)
    if not chosen or not full:
        raise BenchError(
            f"{len(chosen)} first requests and {len(full)} buckets of steady ones: none to compare"
        )
    weighted, borrowed = list[tuple[float, float]](), 0
    for call in chosen:
        bucket = bucket_of(call.uncached_tokens)
        nearest = min(full, key=lambda each: (abs(each - bucket), each))
        borrowed += nearest != bucket
        for other in samples[nearest]:
            more_s = (call.uncached_tokens - other.uncached_tokens) * token_s if nearest != bucket else 0.0
            weighted.append((other.ttft_s + more_s, 1.0 / len(samples[nearest])))
    p95_s = quantile((call.ttft_s for call in chosen), QUANTILE)
    return Comparison(len(chosen), p95_s, _weighted_quantile(weighted, QUANTILE), borrowed)


def bucket_of(uncached_tokens: int) -> int:
    """Return the number of the bucket."""
    return bisect.bisect_right(BUCKETS, uncached_tokens)


def _weighted_quantile(weighted: list[tuple[float, float]], share: float) -> float:
    """Return the smallest value that `share` of the weight does not exceed."""
    weighted.sort()
    left = share * sum(weight for _, weight in weighted) - 1e-9
    for value, weight in weighted:
        left -= weight
        if left <= 0.0:
            return value
    return weighted[-1][0]
