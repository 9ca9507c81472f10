"""How long the other side has said nothing. Pure.

A process that stood still itself - stopped, starved - did not listen: that time says nothing about the other side, and
what was sent meanwhile still waits to be read.
"""

from __future__ import annotations

from typing import Final

CHECK_INTERVAL_S: Final = 0.25
"""How often to look."""

STALL_S: Final = 0.75
"""Looks that lie further apart than this: we stood still ourselves."""


class FailureDetector:
    """Tells when nothing was heard for `limit_s`, while somebody looks every LOOK_S."""

    __slots__ = ("_heard_s", "_looked_s", "limit_s")

    def __init__(self, limit_s: float, now_s: float) -> None:
        self.limit_s = limit_s
        self._heard_s = now_s
        self._looked_s = now_s

    def heartbeat(self, now_s: float) -> None:
        """Something came."""
        self._heard_s = now_s

    def check(self, now_s: float) -> bool:
        """Return whether the silence has lasted for the limit. The time we stood still does not count."""
        gap_s = now_s - self._looked_s
        self._looked_s = now_s
        if gap_s > STALL_S:
            self._heard_s = min(now_s, self._heard_s + gap_s)
        return now_s - self._heard_s >= self.limit_s

    def silent_s(self, now_s: float) -> float:
        """Return how long nothing was heard, as of the last look."""
        return max(0.0, now_s - self._heard_s)
