"""Clocks. In the services and in kvmesh without its `cli`, only this module calls time.monotonic."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since a fixed point in time. INVARIANT: never decreases."""

    def now_s(self) -> float:
        """Return the seconds now."""
        ...


class MonotonicClock:
    """The machine's monotonic clock, which asyncio's loop uses too."""

    def now_s(self) -> float:
        """Return the seconds now."""
        return time.monotonic()


class VirtualClock:
    """A clock that moves only by `advance`. For simulations and tests."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        """Return the seconds now."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Advance by `seconds` >= 0."""
        if seconds < 0:
            raise ValueError(f"seconds is {seconds}; 0 or more is allowed")
        self._now_s += seconds


def wall_s() -> int:
    """Return seconds since 1970, for a comparison with another process's wall clock; clock skew of a minute is allowed."""
    return int(time.time())


def wall_ns() -> int:
    """Return nanoseconds since 1970, for logs and spans only. Decisions use a Clock."""
    return time.time_ns()
