"""What a prefill costs: c0 + u (a + b (T - u / 2)) seconds for u uncached of T tokens, fitted while serving.

Pure. The form is causal attention's (reference: Mooncake, FAST'25). The fit is a least-squares fit of relative errors that
forgets slowly; what the engine has not shown yet stays at the prior.
"""

from __future__ import annotations

from itertools import combinations
from typing import Final

PRIOR: Final = (0.01, 50e-6, 1e-9)
"""c0 (s), a (s/token), b (s/token^2) before the first observation: a model of some billion weights on one GPU."""

PRIOR_WEIGHT: Final = 0.05
"""Observations the prior counts for, per coefficient."""

FORGET: Final = 0.995
"""Weight of an observation after each later one: about the last 200 count."""

SECONDS_MIN: Final = 1e-4
"""Shorter prefills are taken as this long: clocks and queues blur them."""


class CostModel:
    """Estimates prefill seconds; learns from real ones."""

    def __init__(self) -> None:
        self.observation_total = 0
        self._coefficients = PRIOR
        scaled = [value / scale for value, scale in zip(PRIOR, _SCALES, strict=True)]
        self._prior = [PRIOR_WEIGHT / value**2 for value in scaled]
        self._prior_target = [PRIOR_WEIGHT / value for value in scaled]
        self._gram = [[0.0] * 3 for _ in range(3)]
        self._target = [0.0] * 3

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """c0 (s), a (s/token), b (s/token^2) now; none is negative."""
        return self._coefficients

    def estimate_s(self, uncached: int, total: int) -> float:
        """Return the seconds a prefill of `uncached` of `total` tokens will take; at least one token is computed."""
        c0, a, b = self._coefficients
        uncached = max(1, uncached)
        return c0 + uncached * (a + b * (total - uncached / 2))

    def observe(self, uncached: int, total: int, seconds: float) -> None:
        """Learn from a prefill that took `seconds`."""
        uncached = max(1, uncached)
        seconds = max(SECONDS_MIN, seconds)
        terms = (1.0, uncached, uncached * (total - uncached / 2))
        row = [term * scale / seconds for term, scale in zip(terms, _SCALES, strict=True)]
        for i in range(3):
            self._target[i] = self._target[i] * FORGET + row[i]
            for j in range(3):
                self._gram[i][j] = self._gram[i][j] * FORGET + row[i] * row[j]
        self.observation_total += 1
        if self.observation_total <= 32 or not self.observation_total % 8:
            self._fit()

    def _fit(self) -> None:
        """Minimize the squared relative error with no coefficient below 0: the best of the 7 sets of positive ones."""
        gram = [row[:] for row in self._gram]
        target = [known + prior for known, prior in zip(self._target, self._prior_target, strict=True)]
        for i in range(3):
            gram[i][i] += self._prior[i]
        best: tuple[float, list[float]] | None = None
        for size in (3, 2, 1):
            for chosen in combinations(range(3), size):
                solution = _solve([[gram[i][j] for j in chosen] for i in chosen], [target[i] for i in chosen])
                if solution is None or min(solution) < 0:
                    continue
                full = [0.0] * 3
                for i, value in zip(chosen, solution, strict=True):
                    full[i] = value
                loss = -sum(target[i] * full[i] for i in range(3))  # of the minimum within the set
                if best is None or loss < best[0]:
                    best = loss, full
            if best is not None and size == 3:
                break
        if best is not None:
            c0, a, b = (value * scale for value, scale in zip(best[1], _SCALES, strict=True))
            self._coefficients = (c0, a, b)


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve a small positive definite system by elimination; None if it is singular."""
    size = len(right)
    rows = [[*matrix[i], right[i]] for i in range(size)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(rows[k][i]))
        if abs(rows[pivot][i]) < 1e-12:
            return None
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            for j in range(i, size + 1):
                rows[k][j] -= factor * rows[i][j]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution


_SCALES: Final = (1e-2, 1e-4, 1e-8)
"""Sizes of the coefficients, so that the system is well conditioned."""
