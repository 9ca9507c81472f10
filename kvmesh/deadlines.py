"""Deadlines: remaining time on the wire, moments on a monotonic clock inside a process.

Pure. A hop adds the remaining milliseconds to its own clock and subtracts its margin, so that it can still report its
own timeout before its caller gives up (architecture, section 2).
"""

from __future__ import annotations

import math

HOP_MARGIN_S = 0.005
"""What each hop keeps for its own answer: a local round trip with room (measured: 0.7 ms)."""

RUNTIME_MAX_S = 3600.0
"""Longest a request may run: one hour."""

REMAINING_MS_MAX = 3_601_000
"""Longest time a budget can carry: the hour, and what hops get beyond it lest their margins cut the hour."""


def from_remaining_ms(remaining_ms: int, now_s: float) -> float:
    """Return the moment a receiver must be done by: in the past if `remaining_ms` does not cover the margin."""
    return now_s + left_s(remaining_ms)


def left_s(remaining_ms: int) -> float:
    """Return the seconds that a receiver has: negative if `remaining_ms` does not cover the margin."""
    return remaining_ms / 1000 - HOP_MARGIN_S


def from_remaining_s(remaining_s: float, now_s: float) -> float:
    """Return the moment a server must be done by whose client waits `remaining_s` more."""
    return now_s + remaining_s - HOP_MARGIN_S


def remaining_ms(deadline_s: float, now_s: float) -> int:
    """Return the whole milliseconds until `deadline_s`: 0 if it passed, at most REMAINING_MS_MAX."""
    return min(REMAINING_MS_MAX, max(0, math.floor((deadline_s - now_s) * 1000)))


def earliest(*moments_s: float | None) -> float | None:
    """Return the first of the moments that are set, or None if none is."""
    first_s = None
    for moment_s in moments_s:
        if moment_s is not None and (first_s is None or moment_s < first_s):
            first_s = moment_s
    return first_s
