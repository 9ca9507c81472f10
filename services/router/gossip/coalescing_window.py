"""Coalescing window: how long a gossip message waits for others, so that one entry carries them all. Pure.

Each entry wakes its writer and every router that reads it. A dispatch is urgent, because other routers choose replicas
by it. Starts and finishes only correct an estimate.
"""

from __future__ import annotations

from math import inf
from typing import Final

COALESCE_S: Final = 0.025
"""A message that is not urgent waits at most this long."""


class CoalescingWindow:
    """The time at which all waiting messages are due: at once after an urgent one, else COALESCE_S after the first."""

    def __init__(self) -> None:
        self.due_s = inf
        """Infinite while no message waits."""

    def add(self, now_s: float, *, is_urgent: bool) -> None:
        """Add a message that waits from `now_s`."""
        self.due_s = min(self.due_s, now_s if is_urgent else now_s + COALESCE_S)

    def clear(self) -> None:
        """Start again without messages: all are written or dropped."""
        self.due_s = inf
