"""How fast the router's queue drains, and so how long a request would wait in it. Pure."""

from __future__ import annotations

from typing import Final

from kvmesh.drain_rate import DrainRate, Stock

BUSY_MIN_S: Final = 0.5
RELEASES_MIN: Final = 8
"""Before so much was seen with somebody waiting, the rate is unknown: requests are refused by it."""

REQUEST_TOKENS_MIN: Final = 16
"""A request counts for at least so many tokens: the shortest has its cost too."""

RETRY_MS_UNKNOWN: Final = 1000


class QueueDelay:
    """Tokens released per second, measured only while something waits: then it is what the replicas can take.

    Tokens that are expected to be computed, not those of the prompts: in the order of the queue cached prompts go first, so
    that prompt tokens drain at another pace before a short request than before a long one.
    """

    def __init__(self) -> None:
        self._rate = DrainRate(Stock.QUEUE, freed_min=RELEASES_MIN, seen_min_s=BUSY_MIN_S)
        self._has_stock = False

    def waits(self, is_anything_waiting: bool, now_s: float) -> None:
        """Something waits from now on, or nothing any more. Idempotent."""
        if is_anything_waiting != self._has_stock:
            self._has_stock = is_anything_waiting
            self._rate.stock(float(is_anything_waiting), now_s)

    def released(self, tokens: int, now_s: float) -> None:
        """A request of which `tokens` are to be computed left the queue for a replica."""
        self._rate.freed(max(REQUEST_TOKENS_MIN, tokens), now_s)

    def wait_s(self, tokens_ahead: float, now_s: float) -> float | None:
        """Return the seconds until `tokens_ahead` are released: 0 without any, None if nobody can say."""
        return self._rate.wait_s(tokens_ahead, now_s)

    def retry_after_ms(self, tokens_ahead: float, now_s: float) -> int:
        """Return after how long `tokens_ahead` will have drained, within the bounds of DrainRate."""
        return self._rate.retry_ms(tokens_ahead, now_s) or RETRY_MS_UNKNOWN
