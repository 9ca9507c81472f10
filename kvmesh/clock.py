"""Where time comes from: the one module that reads the monotonic clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells seconds since some fixed moment; never goes back."""

    def now_s(self) -> float:
        """Return the seconds now."""
        ...


class MonotonicClock:
    """The machine's monotonic clock, the same one asyncio's loop uses."""

    def now_s(self) -> float:
        """Return the seconds now."""
        return time.monotonic()


class VirtualClock:
    """A clock that stands still until somebody moves it. For simulations and tests."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        """Return the seconds now."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move on by `seconds` >= 0."""
        if seconds < 0:
            raise ValueError(f"seconds is {seconds}; 0 or more is allowed")
        self._now_s += seconds


def wall_s() -> int:
    """Return seconds since 1970. For what another process compares with its own wall clock, to within a minute."""
    return int(time.time())


def wall_ns() -> int:
    """Return nanoseconds since 1970. For logs and spans only; decisions use a Clock."""
    return time.time_ns()
