"""Cost model of a prefill: c0 + u (a + b (T - u / 2)) seconds for u uncached of T tokens, fitted while serving.

Pure. The form is that of causal attention (reference: Mooncake, FAST'25). The fit is least squares of relative errors over
the last prefills. Coefficients that the engine has not shown yet stay near the prior. A pause or a stall makes a prefill
look too long. An observation far from those of its size therefore counts as at a bounded distance (Huber's estimate).
"""

from __future__ import annotations

from collections import deque
from itertools import combinations
from math import exp, log
from statistics import median
from typing import Final

PRIOR: Final = (0.01, 50e-6, 1e-9)
"""c0 (s), a (s/token), b (s/token^2) before the first observation: a model of some billion weights on one GPU."""

B_PER_A_MAX: Final = 6e-4
"""Upper bound of b / a. Per layer a pair of tokens takes four operations a channel, and a token takes two a weight. The
ratio is 2e-5 to 4e-5 for dense models of 8 to 70 billion weights, and 1.2e-4 for 30 billion with 3 active. It is twice that
where attention kernels are half as quick as matrix products, and larger for models of narrow layers.

A GPU takes nearly as long for 1 token as for 200, because it reads all weights (docs/measurements/gpu.md). Without the
bound the fit would take this bend for attention. The estimates of prompts longer than those seen would then be several
times too high.
"""

PRIOR_WEIGHT: Final = 0.002
"""Observations that the prior counts for, per coefficient."""

WINDOW: Final = 128
"""Prefills in the fit."""

FIT_EVERY: Final = 32
"""Observations between two fits; a fit follows each of the first ones. It takes some 0.3 ms (measured once, by hand).
Errors are relative to the previous estimates, so that noise has no bias."""

SPREAD_MIN: Final = 0.1
"""Smallest relative spread. Prefills of the same size differ by this share on a healthy engine."""

OUTLIER_SPREADS: Final = 2.5
"""Bound of Huber's estimate in spreads (1.5 median deviations) from the observations of the same size."""

SIZE_NEIGHBOURS: Final = 4
"""Neighbours by size on each side, the median of which is the reference. A wrong estimate is wrong for all
prefills of a size, a stall lengthens one."""

FITS: Final = 3
"""Fits in a row while observations are few. Errors are relative to the previous estimates, which were far off."""

SECONDS_MIN: Final = 1e-4
"""Shorter prefills count as this long, because clocks and queues blur them."""


class CostModel:
    """Estimates prefill seconds, and learns from measured ones."""

    def __init__(self) -> None:
        self.observation_total = 0
        self._coefficients = PRIOR
        self._seen: deque[tuple[int, float, float]] = deque(maxlen=WINDOW)
        """(u, u (T - u / 2), seconds)"""

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Present c0 (s), a (s/token), b (s/token^2); none is negative."""
        return self._coefficients

    @property
    def fitted_count(self) -> int:
        """Prefills that the next fit looks at."""
        return len(self._seen)

    @property
    def uncached_span(self) -> tuple[int, int]:
        """Fewest and most uncached tokens of the prefills that the next fit looks at; 0 and 0 without any."""
        uncached = [tokens for tokens, _, _ in self._seen]
        return (min(uncached), max(uncached)) if uncached else (0, 0)

    def estimate_s(self, uncached: int, total: int) -> float:
        """Return the estimated seconds of a prefill of `uncached` of `total` tokens. At least one token is computed."""
        c0, a, b = self._coefficients
        if uncached < 1:
            uncached = 1
        return c0 + uncached * (a + b * (total - uncached / 2))

    def observe(self, uncached: int, total: int, seconds: float) -> None:
        """Learn from a prefill that took `seconds`."""
        uncached = max(1, uncached)
        total = max(total, uncached)
        self._seen.append((uncached, uncached * (total - uncached / 2), max(SECONDS_MIN, seconds)))
        self.observation_total += 1
        if self.observation_total < FIT_EVERY or not self.observation_total % FIT_EVERY:
            for _ in range(FITS if self.observation_total <= FIT_EVERY else 1):
                self._fit()

    def forget(self) -> None:
        """Forget all observations. The estimates stay as they are until the next observation."""
        self.observation_total = 0
        self._seen.clear()

    def _fit(self) -> None:
        """Minimize the squared relative error, with no coefficient below 0 and b within its bound.

        The unknowns are c0, the part of a above the least that b allows, and b. With none below 0, the bound holds too.
        """
        c0, a, b = self._coefficients
        # Unknowns are in units of the previous estimates, or of the prior where that is larger. Otherwise a coefficient of
        # fifty times the prior would be drawn to the prior fifty times as hard.
        s0, s1, s2 = map(max, _unknowns(PRIOR), _unknowns(self._coefficients))
        g00 = g01 = g02 = g11 = g12 = g22 = t0 = t1 = t2 = ratio = 0.0
        for (tokens, products, _), seconds in zip(self._seen, self._plausible_s(), strict=True):
            weight = 1.0 / (c0 + a * tokens + b * products)
            r0, r1, y = s0 * weight, s1 * tokens * weight, seconds * weight
            r2 = s2 * (products + tokens / B_PER_A_MAX) * weight
            g00 += r0 * r0
            g01 += r0 * r1
            g02 += r0 * r2
            g11 += r1 * r1
            g12 += r1 * r2
            g22 += r2 * r2
            t0 += r0 * y
            t1 += r1 * y
            t2 += r2 * y
            ratio += r0 + r1 + r2
        prior = PRIOR_WEIGHT * (ratio / len(self._seen)) ** 2  # on the scale of the weighted observations
        gram = [[g00 + prior, g01, g02], [g01, g11 + prior, g12], [g02, g12, g22 + prior]]
        p0, p1, p2 = (
            prior * typical / unit for typical, unit in zip(_unknowns(PRIOR), (s0, s1, s2), strict=True)
        )
        best = _minimum(gram, [t0 + p0, t1 + p1, t2 + p2])
        if best is not None:
            x0, x1, x2 = best
            self._coefficients = (x0 * s0, x1 * s1 + x2 * s2 / B_PER_A_MAX, x2 * s2)

    def _plausible_s(self) -> list[float]:
        """Return the seconds of each observation, with outliers drawn towards the observations of the same size."""
        c0, a, b = self._coefficients
        expected = [c0 + a * tokens + b * products for tokens, products, _ in self._seen]
        by_size = sorted(range(len(expected)), key=expected.__getitem__)
        log_errors = [log(self._seen[index][2] / expected[index]) for index in by_size]
        typical = [
            median(log_errors[max(0, position - SIZE_NEIGHBOURS) : position + SIZE_NEIGHBOURS + 1])
            for position in range(len(log_errors))
        ]
        spread = 1.5 * median(abs(one - middle) for one, middle in zip(log_errors, typical, strict=True))
        threshold = OUTLIER_SPREADS * max(SPREAD_MIN, spread)
        plausible_s = expected
        for index, log_error, middle in zip(by_size, log_errors, typical, strict=True):
            plausible_s[index] *= exp(min(middle + threshold, max(middle - threshold, log_error)))
        return plausible_s


def _unknowns(coefficients: tuple[float, float, float]) -> tuple[float, float, float]:
    """Return c0, the part of a above the least that b allows, and b."""
    c0, a, b = coefficients
    return c0, max(0.0, a - b / B_PER_A_MAX), b


def _minimum(gram: list[list[float]], target: list[float]) -> list[float] | None:
    """Return the x >= 0 that minimizes x'Gx - 2 x'target: the best over all sets of positive entries."""
    best: tuple[float, list[float]] | None = None
    for size in (3, 2, 1):
        for chosen in combinations(range(3), size):
            solution = _solve([[gram[i][j] for j in chosen] for i in chosen], [target[i] for i in chosen])
            if solution is None or min(solution) < 0:
                continue
            full = [0.0] * 3
            for i, value in zip(chosen, solution, strict=True):
                full[i] = value
            loss = -sum(target[i] * full[i] for i in range(3))  # the minimum over this set
            if best is None or loss < best[0]:
                best = loss, full
        if best is not None and size == 3:
            break
    return None if best is None or not any(best[1]) else best[1]


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
