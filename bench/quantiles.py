"""The quantile of all figures that are not medians."""

from __future__ import annotations

from collections.abc import Iterable

from bench.processes import BenchError


def quantile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that `share` of all do not exceed. Raises BenchError without values."""
    ordered = sorted(values)
    if not ordered:
        raise BenchError("no request had a first token")
    return ordered[max(0, -(-round(share * 1000) * len(ordered) // 1000) - 1)]
