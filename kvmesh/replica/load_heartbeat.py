"""Heartbeat of a process: when the next load report is due. Pure.

A report is due on a change, at most every `CHANGE_S`, and otherwise every `IDLE_S`. The receivers' failure detectors use
the reports as heartbeats.
"""

from __future__ import annotations

from typing import Final

CHANGE_S: Final = 0.05
IDLE_S: Final = 1.0


class LoadHeartbeat:
    """Times of the load reports of one process. No report is due while there is no listener."""

    __slots__ = ("_has_changed", "_sent_s", "has_listener")

    def __init__(self) -> None:
        self.has_listener = False
        """True while a caller is attached."""
        self._has_changed = False
        self._sent_s = float("-inf")

    def touch(self) -> None:
        """Note a change of the load."""
        self._has_changed = True

    def next_s(self) -> float | None:
        """Return when a report is due, or None."""
        if not self.has_listener:
            return None
        return self._sent_s + (CHANGE_S if self._has_changed else IDLE_S)

    def take(self, now_s: float) -> bool:
        """Return True if a report is to be sent now, and count it as sent."""
        due_s = self.next_s()
        if due_s is None or now_s < due_s:
            return False
        self._has_changed = False
        self._sent_s = now_s
        return True
