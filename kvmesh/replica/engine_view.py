"""What an engine last said of its load, and whether that still says anything. Pure.

A report that is old is no report: it is neither read as "full" nor as "free".
"""

from __future__ import annotations

from typing import Final

from kvmesh.triton.port import EngineLoad

FRESH_S: Final = 3.0
"""An engine with load reports sends one each second."""


class EngineView:
    """The last report of an engine. `last` stays known however old it is: its boot id does not age."""

    __slots__ = ("_heard_s", "last")

    def __init__(self) -> None:
        self.last: EngineLoad | None = None
        self._heard_s = float("-inf")

    @property
    def boot_id(self) -> str:
        """Boot id of the engine; empty: it said nothing yet."""
        return self.last.boot_id if self.last else ""

    def take(self, load: EngineLoad, now_s: float) -> bool:
        """Keep a report. Return whether it says something new."""
        known, self.last = self.last, load
        self._heard_s = now_s
        return load != known

    def fresh(self, now_s: float) -> EngineLoad | None:
        """Return the report, or None if it is older than FRESH_S."""
        return self.last if now_s - self._heard_s <= FRESH_S else None

    def step_s(self, now_s: float) -> float:
        """Return the engine's own measure of its steps. 0: unknown; an engine that runs nothing measures none."""
        load = self.fresh(now_s)
        return load.step_s if load is not None and load.sequences_running else 0.0
