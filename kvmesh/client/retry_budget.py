"""Retry budget of a client over all its requests: it bounds retry amplification while the mesh is full. Pure.

Each request adds a share of a retry, each minute adds one, and each retry after a refusal for load takes one. The budget
begins full, so a client with few requests retries as its policy says. Resumes, failovers to another frontend and refusals
for the caller's own quota take nothing.

INVARIANT: n requests in t minutes make at most `most` + n x share + t retries.
"""

from __future__ import annotations

from typing import Final

SPARE: Final = 5.0
"""Retries that a client without a history has with the default share, and the most that it can save up."""

SPARE_SHARE: Final = 0.05
"""The share of SPARE; a larger one saves up more."""

REFILL_PER_S: Final = 1 / 60
ROUNDING: Final = 1e-9


class RetryBudget:
    """See the module. `share`: retries for each request; infinite: no bound."""

    __slots__ = ("_at_s", "_left", "_most", "_share")

    def __init__(self, share: float) -> None:
        self._share = share
        self._most = SPARE * max(1.0, share / SPARE_SHARE)
        self._left = self._most
        self._at_s: float | None = None

    def __repr__(self) -> str:
        return f"RetryBudget({self._left:.1f} left)"

    def on_request(self) -> None:
        """Count a request."""
        self._left = min(self._most, self._left + self._share)

    def take(self, now_s: float) -> bool:
        """Take a retry; return False if none is left."""
        if self._at_s is not None:
            self._left = min(self._most, self._left + REFILL_PER_S * max(0.0, now_s - self._at_s))
        self._at_s = now_s
        if self._left < 1.0 - ROUNDING:
            return False
        self._left -= 1.0
        return True
