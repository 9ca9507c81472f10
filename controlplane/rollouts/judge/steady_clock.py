"""Wall time that never goes back, for the judge. Pure.

A wall clock that steps back would hide the requests of a step until it has caught up.
"""

from __future__ import annotations


class SteadyClock:
    """See the module. `last_s`: the latest time that an earlier leader's clock gave."""

    def __init__(self, last_s: float = 0.0) -> None:
        self._last_s = last_s
        self._ahead_s = 0.0
        """Sum of the steps back. It stays, so that time goes on at the wall clock's pace."""

    def at(self, wall_s: float) -> float:
        """Return the steady time at `wall_s`."""
        self._ahead_s = max(self._ahead_s, self._last_s - wall_s)
        self._last_s = wall_s + self._ahead_s
        return self._last_s
