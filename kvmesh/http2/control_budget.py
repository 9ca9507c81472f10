"""Rate limit of frames that cost their sender nothing: PING, SETTINGS, resets, window updates (HTTP/2 floods). Pure.

A connection over its budget ends with GOAWAY (ENHANCE_YOUR_CALM), as after CVE-2019-9512, -9515 and CVE-2023-44487.
"""

from __future__ import annotations

from typing import Final

BURST: Final = 4_000.0
"""Budget of a new connection and its largest: a client may cancel all its calls at once."""

PER_S: Final = 200.0
"""Growth of the budget each second."""

PER_MESSAGE: Final = 2.0
"""Growth of the budget with each message that this side sends: a client may answer it with two window updates."""


class ControlBudget:
    """The budget of one connection. Times are seconds of one clock."""

    __slots__ = ("_at_s", "_left")

    def __init__(self, now_s: float) -> None:
        self._left = BURST
        self._at_s = now_s

    def earn(self, messages: int) -> None:
        """Enlarge the budget for `messages` that were sent."""
        self._left = min(BURST, self._left + PER_MESSAGE * messages)

    def spend(self, frames: int, now_s: float) -> bool:
        """Take `frames` from the budget. Return False if they exceed it."""
        self._left = min(BURST, self._left + PER_S * (now_s - self._at_s)) - frames
        self._at_s = now_s
        return self._left >= 0
