"""Failure detector: a peer without a heartbeat for a time is lost. Pure.

Time in which this process itself stood still (stopped, or short of CPU) does not count. It read no messages then, and
those of the peer still wait to be read.
"""

from __future__ import annotations

from typing import Final

CHECK_INTERVAL_S: Final = 0.25
"""Time between two checks."""

STALL_S: Final = 0.75
"""A longer time between two checks means that this process stood still."""


class FailureDetector:
    """Detects `limit_s` without a heartbeat. Call `check` every CHECK_INTERVAL_S."""

    __slots__ = ("_checked_s", "_heartbeat_s", "limit_s")

    def __init__(self, limit_s: float, now_s: float) -> None:
        self.limit_s = limit_s
        self._heartbeat_s = now_s
        self._checked_s = now_s

    def heartbeat(self, now_s: float) -> None:
        """Take a message of the peer; any message is a heartbeat."""
        self._heartbeat_s = now_s

    def check(self, now_s: float) -> bool:
        """Return True if no heartbeat came for the limit. Time in which this process stood still does not count."""
        gap_s = now_s - self._checked_s
        self._checked_s = now_s
        if gap_s > STALL_S:
            self._heartbeat_s = min(now_s, self._heartbeat_s + gap_s)
        return now_s - self._heartbeat_s >= self.limit_s

    def silent_s(self, now_s: float) -> float:
        """Return the time since the last heartbeat, corrected at the last check."""
        return max(0.0, now_s - self._heartbeat_s)
