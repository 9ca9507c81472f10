"""Time per output token (TPOT) of the first requests at a fresh decode, beside that of steady requests. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from bench.results import quantile
from bench.warmups.first_tokens import FIRST, QUANTILE, Call

OUTPUT_TOKENS_MIN: Final = 2
"""Shorter answers have no time per output token."""


@dataclass(frozen=True, slots=True)
class OutputPace:
    """p95 of the mean time per output token of a request, in seconds."""

    p95_s: float
    steady_p95_s: float


def compare(steady: Iterable[Call], first: Sequence[Call]) -> OutputPace | None:
    """Compare at most FIRST requests of `first`. None: one of the two sides has no whole answer.

    `steady`: requests that ended before the engine was killed. Later ones waited for a takeover.
    """
    fresh, usual = _tpot_s(first[:FIRST]), _tpot_s(steady)
    return OutputPace(quantile(fresh, QUANTILE), quantile(usual, QUANTILE)) if fresh and usual else None


def _tpot_s(calls: Iterable[Call]) -> list[float]:
    return [
        (call.ended_s - call.first_s) / (call.output_tokens - 1)
        for call in calls
        if call.first_s is not None and not call.error and call.output_tokens >= OUTPUT_TOKENS_MIN
    ]
