"""The best fit of c0 + u (a + b (T - u / 2)) to timed prefills, and of decode steps, with their errors. Pure.

`least`: the least number of tokens that a prefill counts as. A GPU reads all weights for one token as for two hundred.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from bench.gpu.recording import Prefill, Step


class Errors(NamedTuple):
    """Absolute relative errors of estimates."""

    median: float
    p90: float
    worst: float


@dataclass(frozen=True, slots=True)
class Fit:
    """The form with its coefficients."""

    c0_s: float
    a_s: float
    b_s: float
    least: int = 1

    def seconds(self, uncached: int, total: int) -> float:
        """Return the estimate for `uncached` of `total` tokens."""
        tokens = max(self.least, uncached)
        total = max(tokens, total)
        return self.c0_s + tokens * (self.a_s + self.b_s * (total - tokens / 2))

    def off(self, prefill: Prefill) -> float:
        """Return the relative error of the estimate, above 0 if the estimate is too high."""
        return self.seconds(prefill.uncached, prefill.total) / prefill.median_s - 1

    def errors(self, prefills: Sequence[Prefill]) -> Errors:
        """Return the errors for `prefills`."""
        return errors_of([self.off(prefill) for prefill in prefills])


def errors_of(off: Sequence[float]) -> Errors:
    """Return median, p90 and worst of relative errors."""
    sizes = np.abs(np.array(off))
    return Errors(float(np.median(sizes)), float(np.quantile(sizes, 0.9)), float(sizes.max()))


def fit(prefills: Sequence[Prefill], least: int = 1) -> Fit:
    """Return the coefficients, none below 0, with the least squared relative error."""
    rows = []
    for prefill in prefills:
        tokens = max(least, prefill.uncached)
        total = max(tokens, prefill.total)
        rows.append((1.0, float(tokens), tokens * (total - tokens / 2)))
    scaled = np.array(rows) / np.array([[prefill.median_s] for prefill in prefills])
    c0, a, b = (float(value) for value in _non_negative(scaled))
    return Fit(c0, a, b, least)


def _non_negative(rows: Any) -> Any:
    """Return the x >= 0 with rows @ x nearest to 1: the best over all sets of positive entries."""
    unit = rows.max(axis=0)
    best, least_loss = np.zeros(rows.shape[1]), float("inf")
    for size in range(1, rows.shape[1] + 1):
        for chosen in combinations(range(rows.shape[1]), size):
            part = rows[:, chosen] / unit[list(chosen)]
            solution = np.linalg.lstsq(part, np.ones(len(rows)), rcond=None)[0]
            loss = float(((part @ solution - 1) ** 2).sum())
            if solution.min() >= 0 and loss < least_loss:
                best, least_loss = np.zeros(rows.shape[1]), loss
                best[list(chosen)] = solution / unit[list(chosen)]
    return best


class StepFit(NamedTuple):
    """Two estimates of a step's time, each with its errors.

    The line: base_s + stream_s * streams + token_s * tokens of context over all streams. The constant: constant_s.
    """

    base_s: float
    stream_s: float
    token_s: float
    errors: Errors
    constant_s: float
    constant_errors: Errors


def fit_steps(steps: Sequence[Step]) -> StepFit:
    """Return the line of least squared relative errors. The constant is the geometric mean of least and most."""
    seconds = np.array([step.median_s for step in steps])
    rows = np.array([(1.0, step.batch, step.batch * step.context) for step in steps])
    line = np.linalg.lstsq(rows / seconds[:, None], np.ones(len(steps)), rcond=None)[0]
    constant_s = float(np.sqrt(seconds.min() * seconds.max()))
    errors, constant_errors = (errors_of(list(one / seconds - 1)) for one in (rows @ line, constant_s))
    base_s, stream_s, token_s = map(float, line)
    return StepFit(base_s, stream_s, token_s, errors, constant_s, constant_errors)
