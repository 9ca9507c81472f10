"""Decides whether a frontend copies requests now, beside the snapshot. Pure.

On -> off: the shadow's time is over, its ceiling is reached, its target has another tokenizer, the frontend drains, or
users wait at routers. Off -> on: the reason is gone; for the queue delay, HOLD_S after the last high one.
"""

from __future__ import annotations

from typing import Final

QUEUE_DELAY_MAX_S: Final = 0.5
"""Queue delay of users above which nothing is copied."""

HOLD_S: Final = 5.0
"""Time without a high queue delay after which requests are copied again."""

EXPIRED: Final = "expired"
CEILING: Final = "ceiling"
TOKENIZER: Final = "tokenizer"
DRAINING: Final = "draining"
QUEUE_DELAY: Final = "queue_delay"


class OffSwitch:
    """See the module. Once expired or at its ceiling, a shadow stays off."""

    def __init__(self, expires_s: float) -> None:
        """`expires_s`: wall clock, Unix seconds."""
        self._expires_s = expires_s
        self._final = ""
        self._delayed_s = float("-inf")
        """Time of the last high queue delay."""

    def on_ceiling(self) -> None:
        """Note that the ceiling is reached."""
        self._final = self._final or CEILING

    def reason(
        self, now_s: float, wall_s: float, queue_delay_s: float, *, has_tokenizer: bool, is_draining: bool
    ) -> str:
        """Return why nothing is copied now; empty: requests are copied. `queue_delay_s`: of users."""
        if not self._final and wall_s >= self._expires_s:
            self._final = EXPIRED
        if queue_delay_s > QUEUE_DELAY_MAX_S:
            self._delayed_s = now_s
        if self._final:
            return self._final
        if not has_tokenizer:
            return TOKENIZER
        if is_draining:
            return DRAINING
        return QUEUE_DELAY if now_s - self._delayed_s < HOLD_S else ""
