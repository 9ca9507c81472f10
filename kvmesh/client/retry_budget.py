"""Retry budget of a client over all its requests: it bounds retry amplification while the mesh is full. Pure.

Each request adds a share of a retry, and each retry after a refusal for load takes one. The budget begins full, so a client
with few requests retries as its policy says. Resumes, failovers and refusals for the caller's own quota take nothing.

INVARIANT: n requests make at most SPARE + n x share retries.
"""

from __future__ import annotations

from typing import Final

SPARE: Final = 10.0
"""Retries that a client without a history has, and the most that it can save up."""


class RetryBudget:
    """See the module. `share`: retries for each request."""

    __slots__ = ("_left", "_share")

    def __init__(self, share: float) -> None:
        self._share = share
        self._left = SPARE

    def __repr__(self) -> str:
        return f"RetryBudget({self._left:.1f} left)"

    def on_request(self) -> None:
        """Count a request."""
        self._left = min(SPARE, self._left + self._share)

    def take(self) -> bool:
        """Take a retry; return False if none is left."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
