"""Retry budget of a frontend: bounds the retries that the frontend adds to the load, against retry storms. Pure.

The budget pays only for retries of work that no engine took, and for cross-checks (decision 0024). A resume takes nothing
from it, because `frontend.attempts_max` bounds the resumes of a request (docs/operating.md, Retry budget).
"""

from __future__ import annotations

from typing import Final

WINDOW_S: Final = 10.0
"""Capacity of the bucket: the inflow of this many seconds at 10 requests per second."""


class RetryBudget:
    """A token bucket of retries: `ratio` flows in per request, `per_s` per second. Starts with WINDOW_S of `per_s`.

    `per_s` is the rate of the mesh, which its frontends share equally (see `share`). Sheddable work and cross-checks leave
    the lower half of the bucket to other work.

    INVARIANT: 0 <= level <= cap.
    """

    __slots__ = ("_at_s", "_cap", "_level", "_mesh_per_s", "_per_s", "_ratio", "refused_total", "spent_total")

    def __init__(self, ratio: float, per_s: float, now_s: float) -> None:
        self._ratio = ratio
        self._mesh_per_s = self._per_s = per_s
        self._cap = WINDOW_S * (per_s + 10 * ratio)
        self._level = WINDOW_S * per_s
        self._at_s = now_s
        self.spent_total = 0
        self.refused_total = 0

    def __repr__(self) -> str:
        return f"RetryBudget({self._level:.2f}/{self._cap:.2f})"

    @property
    def level(self) -> float:
        """Retries that may be spent, as of the last event."""
        return self._level

    def on_request(self, now_s: float) -> None:
        """Count one request of a client."""
        self._refill(now_s)
        self._level = min(self._cap, self._level + self._ratio)

    def share(self, frontends: int, now_s: float) -> None:
        """Set the number of frontends that share `per_s`, this one included."""
        self._refill(now_s)
        before_per_s, self._per_s = self._per_s, self._mesh_per_s / max(1, frontends)
        self._cap = WINDOW_S * (self._per_s + 10 * self._ratio)
        if self._per_s < before_per_s:  # the other frontends saved up the same share
            self._level *= self._per_s / before_per_s
        self._level = min(self._cap, self._level)

    def take(self, now_s: float, *, is_sheddable: bool = False) -> bool:
        """Spend one retry. False: the budget is empty, and the client must get the error."""
        is_taken = self.take_spare(now_s) if is_sheddable else self._take(now_s, 1.0)
        self.refused_total += not is_taken
        return is_taken

    def take_spare(self, now_s: float) -> bool:
        """Spend one retry of the upper half. False: the upper half is empty; not counted as a refused retry."""
        return self._take(now_s, max(1.0, self._cap / 2))

    def _take(self, now_s: float, least: float) -> bool:
        self._refill(now_s)
        if self._level < least:
            return False
        self._level -= 1.0
        self.spent_total += 1
        return True

    def _refill(self, now_s: float) -> None:
        self._level = min(self._cap, self._level + max(0.0, now_s - self._at_s) * self._per_s)
        self._at_s = max(self._at_s, now_s)
