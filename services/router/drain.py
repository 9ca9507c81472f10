"""How fast the router's queue drains, and so how long a request would wait in it. Pure."""

from __future__ import annotations

import math
from typing import Final

MEMORY_S: Final = 10.0
"""Seconds with somebody waiting in which what was released fades to 1/e."""

BUSY_MIN_S: Final = 0.5
RELEASES_MIN: Final = 8
"""Before so much was seen with somebody waiting, the rate is unknown."""

REQUEST_TOKENS_MIN: Final = 16
"""A request counts for at least so many prompt tokens: the shortest has its cost too."""

RETRY_MS_MIN: Final = 50
RETRY_MS_MAX: Final = 30_000
RETRY_MS_UNKNOWN: Final = 1000


class Drain:
    """Prompt tokens released per second, measured only while something waits: then it is what the replicas can take."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._busy_s = 0.0
        self._releases = 0
        self._seen_s = 0.0
        """Seconds with somebody waiting, without fading."""
        self._since_s: float | None = None
        """Until when the busy time is counted. None: nothing waits."""
        self._began_s = 0.0
        """Since when something waits."""

    def waits(self, is_anything_waiting: bool, now_s: float) -> None:
        """Something waits from now on, or nothing any more. Idempotent."""
        if is_anything_waiting:
            if self._since_s is None:
                self._since_s = self._began_s = now_s
        elif self._since_s is not None:
            self._fade(now_s)
            self._since_s = None

    def released(self, tokens: int, now_s: float) -> None:
        """A request with a prompt of `tokens` left the queue for a replica.

        What goes in the moment it came tells what was offered, not what can be taken.
        """
        if self._since_s is not None and now_s > self._began_s:
            self._fade(now_s)
            self._tokens += max(REQUEST_TOKENS_MIN, tokens)
            self._releases += 1

    def tokens_per_s(self, now_s: float) -> float | None:
        """Return the rate; None if too little was seen."""
        if self._since_s is not None:
            self._fade(now_s)
        if self._releases < RELEASES_MIN or self._seen_s < BUSY_MIN_S:
            return None
        return self._tokens / self._busy_s

    def wait_s(self, tokens_ahead: float, now_s: float) -> float | None:
        """Return the seconds until `tokens_ahead` are released: 0 without any, None if nobody can say."""
        if tokens_ahead <= 0:
            return 0.0
        rate = self.tokens_per_s(now_s)
        if rate is None:
            return None
        return tokens_ahead / rate if rate > 0 else math.inf

    def retry_after_ms(self, tokens_ahead: float, now_s: float) -> int:
        """Return after how long `tokens_ahead` will have drained, within RETRY_MS_MIN and RETRY_MS_MAX."""
        wait_s = self.wait_s(tokens_ahead, now_s)
        if wait_s is None:
            return RETRY_MS_UNKNOWN
        return round(min(RETRY_MS_MAX, max(RETRY_MS_MIN, wait_s * 1000)))

    def _fade(self, now_s: float) -> None:
        assert self._since_s is not None
        passed_s = max(0.0, now_s - self._since_s)
        if passed_s > 0:
            factor = math.exp(-passed_s / MEMORY_S)
            self._tokens *= factor
            self._busy_s = self._busy_s * factor + MEMORY_S * (1 - factor)
            self._seen_s += passed_s
            self._since_s = now_s
