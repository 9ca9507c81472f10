"""Deadline propagation: remaining time on the wire, points of a monotonic clock inside a process. Pure.

No deadline compares the clocks of two processes, so clock skew does no harm. Each hop adds the remaining milliseconds to
its own clock and subtracts its margin. So a hop can still report its own timeout before its caller gives up.
"""

from __future__ import annotations

import math

HOP_MARGIN_S = 0.005
"""Time that each hop keeps for its own answer: a local round trip and a reserve.

A local round trip over Attach takes some 0.8 ms (docs/measurements/cost.md, Floor).
"""

RUNTIME_MAX_S = 3600.0
"""Longest a request may run: one hour."""

REMAINING_MS_MAX = 3_601_000
"""Longest remaining time on the wire: one hour and 1 s more, so that the margins of the hops do not shorten the hour."""


def from_remaining_ms(remaining_ms: int, now_s: float) -> float:
    """Return the deadline of a receiver. It is in the past if `remaining_ms` is below the margin."""
    return now_s + left_s(remaining_ms)


def left_s(remaining_ms: int) -> float:
    """Return the seconds that a receiver has. They are negative if `remaining_ms` is below the margin."""
    return remaining_ms / 1000 - HOP_MARGIN_S


def from_remaining_s(remaining_s: float, now_s: float) -> float:
    """Return the deadline of a server for a client that waits `remaining_s` more."""
    return now_s + remaining_s - HOP_MARGIN_S


def remaining_ms(deadline_s: float, now_s: float) -> int:
    """Return the whole milliseconds until `deadline_s`: 0 if it has passed, at most REMAINING_MS_MAX."""
    return min(REMAINING_MS_MAX, max(0, math.floor((deadline_s - now_s) * 1000)))


def earliest(*moments_s: float | None) -> float | None:
    """Return the earliest of the given times, or None if all are None."""
    first_s = None
    for moment_s in moments_s:
        if moment_s is not None and (first_s is None or moment_s < first_s):
            first_s = moment_s
    return first_s
