"""How fast something comes free, and so when enough of it will have. Pure.

What came free is set against the time in which it could have. Time without a stock tells nothing: after an idle hour the
rate is what it was. Time with a stock of which nothing comes free does: while an engine stands still, waits grow.
"""

from __future__ import annotations

import enum
import math
from typing import Final

MEMORY_S: Final = 10.0
"""Seconds with a stock in which what was seen fades to 1/e."""

SEEN_MIN_S: Final = 0.5
"""Below so much time with the present stock the first few that come free would look like a flood."""

RETRY_MS_MIN: Final = 50
RETRY_MS_MAX: Final = 30_000
"""Longer waits are not promised to anybody: by then everything may be different."""


class Stock(enum.Enum):
    """What a stock twice as large means for the rate."""

    QUEUE = "queue"
    """Nothing: a queue drains at the pace of those who take from it, however much waits."""
    HELD = "held"
    """Twice the rate: slots, blocks, places come free each by itself, after the time it is held (Little's law). What came
    free while little was held would promise too little to who finds everything taken."""


class DrainRate:
    """Units per second. Tell it of every change of the stock: what waits in the queue, or what is held.

    Unknown before `freed_min` times something came free and a stock was seen for `seen_min_s`: who refuses work by the rate
    needs more than who tells a client when to come back.
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
        # Weighted by exp(-age / MEMORY_S), an age being time with a stock; as of `_now_s`.
        self._freed = 0.0
        self._stock_s = 0.0
        """Seconds with a stock; times the stock where each comes free by itself."""
        self._seen_s = 0.0
        """Seconds with a stock."""

    def __repr__(self) -> str:
        return f"DrainRate({self._kind.value}, {self._freed:.3g} freed in {self._stock_s:.3g} s of stock)"

    def stock(self, units: float, now_s: float) -> None:
        """From now on `units` wait, or are held. Idempotent."""
        self._pass(now_s)
        if self._stock <= 0:
            self._began_s = now_s
        self._stock = units

    def freed(self, units: float, now_s: float) -> None:
        """`units` of the stock came free.

        What leaves a queue the moment it came tells what was offered, not what can be taken: it does not count.
        """
        if self._kind is Stock.QUEUE and (self._stock <= 0 or now_s <= self._began_s):
            return
        self._pass(now_s)
        self._freed += units
        self._freed_total += 1

    def per_s(self, now_s: float) -> float | None:
        """Return the units that come free per second of the present stock, at least one; None if nobody can say."""
        self._pass(now_s)
        if self._freed_total < self._freed_min or self._seen_s < self._seen_min_s:
            return None
        level = self._level or 1.0
        return self._freed * level / max(self._stock_s, SEEN_MIN_S * level)

    def wait_s(self, units: float, now_s: float) -> float | None:
        """Return the seconds until `units` more are free: 0 without any, infinite if nothing moves, None if unknown."""
        if units <= 0:
            return 0.0
        rate = self.per_s(now_s)
        if rate is None:
            return None
        return units / rate if rate > 0 else math.inf

    def retry_ms(self, units: float, now_s: float) -> int:
        """Return `wait_s` as what a client is told, RETRY_MS_MIN to RETRY_MS_MAX. 0: unknown."""
        wait_s = self.wait_s(units, now_s)
        return 0 if wait_s is None else round(min(RETRY_MS_MAX, max(RETRY_MS_MIN, wait_s * 1000)))

    @property
    def _level(self) -> float:
        """How many come free at a time, each at its own pace."""
        if self._kind is Stock.QUEUE:
            return 1.0 if self._stock > 0 else 0.0
        return max(0.0, self._stock)

    def _pass(self, now_s: float) -> None:
        passed_s = now_s - self._now_s
        if passed_s <= 0:
            return
        self._now_s = now_s
        level = self._level
        if level:
            factor = math.exp(-passed_s / MEMORY_S)
            seen_s = MEMORY_S * (1 - factor)
            self._freed *= factor
            self._stock_s = self._stock_s * factor + level * seen_s
            self._seen_s = self._seen_s * factor + seen_s
