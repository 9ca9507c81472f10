"""Estimates how fast a resource drains; used for Retry-After and for queue-delay admission control. Pure.

The rate is the freed units over the time with a stock, during which units could be freed. Time without a stock counts
nothing: after an idle hour the rate is as before. Time with a stock and no freed unit counts: while an engine stands still,
the estimated waits grow.
"""

from __future__ import annotations

import enum
import math
from typing import Final

MEMORY_S: Final = 10.0
"""Time with a stock in which the memory fades to 1/e, in seconds."""

SEEN_MIN_S: Final = 0.5
"""Shortest time that the rate divides by. In less time the first few freed units would look like a flood."""

RETRY_MS_MIN: Final = 50
RETRY_MS_MAX: Final = 30_000
"""Longest Retry-After sent to a client. A longer estimate would not be reliable."""


class Stock(enum.Enum):
    """How the rate depends on the size of the stock."""

    QUEUE = "queue"
    """Not at all: a queue drains at the pace of its servers, however long it is."""
    HELD = "held"
    """Proportionally: slots and blocks are freed independently, each after its holding time (Little's law). The rate seen
    at a small stock alone would be too low for a client that finds a full one."""


class DrainRate:
    """Units per second. The owner reports every change of the stock: the queued or the held units.

    The rate is unknown before `freed_min` frees and `seen_min_s` seconds with a stock. Refusing work by the rate needs more
    observations than a hint to a client.
    """

    __slots__ = (
        *("_began_s", "_freed", "_freed_min", "_freed_total", "_now_s", "_kind", "_seen_min_s", "_stock"),
        *("_seen_s", "_stock_s"),
    )

    def __init__(self, kind: Stock, *, freed_min: int = 1, seen_min_s: float = 0.0) -> None:
        self._kind = kind
        self._freed_min, self._seen_min_s = max(1, freed_min), seen_min_s
        self._stock = 0.0
        self._began_s = 0.0
        """Since when there is a stock."""
        self._now_s = 0.0
        self._freed_total = 0
        # Weighted by exp(-age / MEMORY_S), with the age as time with a stock, up to `_now_s`.
        self._freed = 0.0
        self._stock_s = 0.0
        """Seconds with a stock, times the stock for Stock.HELD."""
        self._seen_s = 0.0
        """Seconds with a stock."""

    def __repr__(self) -> str:
        return f"DrainRate({self._kind.value}, {self._freed:.3g} freed in {self._stock_s:.3g} s of stock)"

    def stock(self, units: float, now_s: float) -> None:
        """Set the stock to `units` waiting or held. Idempotent."""
        self._advance(now_s)
        if self._stock <= 0:
            self._began_s = now_s
        self._stock = units

    def freed(self, units: float, now_s: float) -> None:
        """Record that `units` of the stock were freed.

        A unit that leaves a queue in the moment of its arrival does not count. It shows the offered rate, not the possible
        one.
        """
        if self._kind is Stock.QUEUE and (self._stock <= 0 or now_s <= self._began_s):
            return
        self._advance(now_s)
        self._freed += units
        self._freed_total += 1

    def per_s(self, now_s: float) -> float | None:
        """Return the units freed per second at the present stock, counted as at least one; None if unknown."""
        self._advance(now_s)
        if self._freed_total < self._freed_min or self._seen_s < self._seen_min_s:
            return None
        level = self._level or 1.0
        return self._freed * level / max(self._stock_s, SEEN_MIN_S * level)

    def wait_s(self, units: float, now_s: float) -> float | None:
        """Return the seconds until `units` more are free: 0 for 0 units, infinite if the rate is 0, None if unknown."""
        if units <= 0:
            return 0.0
        rate = self.per_s(now_s)
        if rate is None:
            return None
        return units / rate if rate > 0 else math.inf

    def retry_ms(self, units: float, now_s: float) -> int:
        """Return `wait_s` in milliseconds for a Retry-After, RETRY_MS_MIN to RETRY_MS_MAX. 0: unknown."""
        wait_s = self.wait_s(units, now_s)
        return 0 if wait_s is None else round(min(RETRY_MS_MAX, max(RETRY_MS_MIN, wait_s * 1000)))

    @property
    def _level(self) -> float:
        """Number of units that are freed independently."""
        if self._kind is Stock.QUEUE:
            return 1.0 if self._stock > 0 else 0.0
        return max(0.0, self._stock)

    def _advance(self, now_s: float) -> None:
        elapsed_s = now_s - self._now_s
        if elapsed_s <= 0:
            return
        self._now_s = now_s
        level = self._level
        if level:
            factor = math.exp(-elapsed_s / MEMORY_S)
            seen_s = MEMORY_S * (1 - factor)
            self._freed *= factor
            self._stock_s = self._stock_s * factor + level * seen_s
            self._seen_s = self._seen_s * factor + seen_s
