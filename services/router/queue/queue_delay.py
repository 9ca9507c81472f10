"""The drain rate of the router's queue: the estimated queue delay for admission control and Retry-After. Pure."""

from __future__ import annotations

from typing import Final

from kvmesh.drain_rate import DrainRate, Stock

BUSY_MIN_S: Final = 0.5
RELEASES_MIN: Final = 8
"""The rate refuses requests, so it is unknown before RELEASES_MIN releases and BUSY_MIN_S with waiting requests."""

REQUEST_TOKENS_MIN: Final = 16
"""A request counts for at least this many tokens, because the shortest request has a cost too."""

RETRY_MS_UNKNOWN: Final = 1000


class QueueDelay:
    """Tokens released per second while requests wait, which is the rate that the replicas can take.

    The rate counts only the tokens that are expected to be computed. The queue releases cached prompts first, and their
    cached tokens would make the rate too high.
    """

    def __init__(self) -> None:
        self._rate = DrainRate(Stock.QUEUE, freed_min=RELEASES_MIN, seen_min_s=BUSY_MIN_S)
        self._has_stock = False

    def waits(self, is_anything_waiting: bool, now_s: float) -> None:
        """Record whether requests wait in the queue. Idempotent."""
        if is_anything_waiting != self._has_stock:
            self._has_stock = is_anything_waiting
            self._rate.stock(float(is_anything_waiting), now_s)

    def released(self, tokens: int, now_s: float) -> None:
        """Record that a request with `tokens` to compute left the queue for a replica."""
        self._rate.freed(max(REQUEST_TOKENS_MIN, tokens), now_s)

    def wait_s(self, tokens_ahead: float, now_s: float) -> float | None:
        """Return the seconds until `tokens_ahead` are released: 0 for 0 tokens, None while the rate is unknown."""
        return self._rate.wait_s(tokens_ahead, now_s)

    def retry_after_ms(self, tokens_ahead: float, now_s: float) -> int:
        """Return the estimated ms until `tokens_ahead` have drained, within the bounds of DrainRate. Unknown: 1,000."""
        return self._rate.retry_ms(tokens_ahead, now_s) or RETRY_MS_UNKNOWN
