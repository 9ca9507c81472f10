"""When a replica writes the next snapshot of its cache. Pure."""

from __future__ import annotations

from typing import Final

SETTLE_S: Final = 2.0
"""A snapshot is written again this long after a takeover of the name. The last holder may have written one meanwhile."""


class SnapshotSchedule:
    """The times of the last and the next snapshot. A snapshot is due at once at first."""

    __slots__ = ("_breaks_seen", "_settle_at_s", "_written_at_s", "interval_s", "is_due")

    def __init__(self, interval_s: float, breaks: int) -> None:
        """`breaks`: number of broken connections to Redis until now."""
        self.interval_s = interval_s
        self.is_due = False
        """True if events were dropped, so that readers need a snapshot."""
        self._breaks_seen = breaks
        self._written_at_s = float("-inf")
        self._settle_at_s = float("inf")

    @property
    def next_s(self) -> float:
        """Time of the next snapshot if no event is dropped and no connection breaks."""
        return min(self._written_at_s + self.interval_s, self._settle_at_s)

    def settle(self, now_s: float) -> None:
        """Note that the process has the name: one snapshot more is due after SETTLE_S."""
        self._settle_at_s = now_s + SETTLE_S

    def take(self, now_s: float, breaks: int) -> bool:
        """Return True if a snapshot is to be written now."""
        if breaks != self._breaks_seen:
            return True  # Redis may have lost both stream and snapshot
        if now_s >= self._settle_at_s:
            self._settle_at_s = float("inf")
            return True
        return self.is_due or now_s >= self._written_at_s + self.interval_s

    def written(self, now_s: float, breaks: int) -> None:
        """Note a written snapshot. `breaks`: broken connections before its first part."""
        self._written_at_s, self._breaks_seen = now_s, breaks
