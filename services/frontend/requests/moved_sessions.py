"""Sessions that spill moved to another region: each stays there until it was idle for IDLE_S. Pure.

Bound: SESSIONS_MAX. Beyond it the session that was idle longest is forgotten, and follows the shares of spill again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

IDLE_S: Final = 60.0
"""Idle time after which a session that was moved may come home: its prefixes over there are cold by then."""

SESSIONS_MAX: Final = 65_536
"""Most sessions: some 10 MB."""


class MovedSessions:
    """Region by the position of a session (`targets.position`)."""

    def __init__(self) -> None:
        self._regions: OrderedDict[int, tuple[str, float]] = OrderedDict()
        """Region and time of the last request, the session that was idle longest first."""

    def __len__(self) -> int:
        return len(self._regions)

    def region(self, position: int, now_s: float) -> str:
        """Return the region to which the session was moved. Empty: it was not moved, or was idle for IDLE_S."""
        found = self._regions.get(position)
        return found[0] if found is not None and now_s - found[1] < IDLE_S else ""

    def note(self, position: int, region: str, now_s: float) -> None:
        """Note a request of a session that `region` serves."""
        self._regions[position] = (region, now_s)
        self._regions.move_to_end(position)
        while self._is_over(now_s):
            self._regions.popitem(last=False)

    def forget(self, position: int) -> None:
        """Forget a session: its region refused it. Idempotent."""
        self._regions.pop(position, None)

    def expire(self, now_s: float) -> None:
        """Forget the sessions that were idle for IDLE_S."""
        while self._regions and self._is_over(now_s):
            self._regions.popitem(last=False)

    def _is_over(self, now_s: float) -> bool:
        """True if there are too many sessions, or if the oldest one was idle for IDLE_S."""
        return len(self._regions) > SESSIONS_MAX or now_s - next(iter(self._regions.values()))[1] >= IDLE_S
