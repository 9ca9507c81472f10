"""The last load report of an engine, with its age. Pure.

A stale report is treated as unknown: it means neither "full" nor "free".
"""

from __future__ import annotations

from typing import Final

from kvmesh.triton.port import EngineLoad

FRESH_S: Final = 3.0
"""Largest age of a fresh report. An engine with load reports sends one each second."""


class EngineView:
    """The last report of an engine. `last` stays at any age, because the boot id in it does not become stale."""

    __slots__ = ("_cached", "_reported_s", "last")

    def __init__(self) -> None:
        self.last: EngineLoad | None = None
        self._cached = ("", 0)
        """Boot id and number of cached blocks, by the engine's KV events."""
        self._reported_s = float("-inf")

    @property
    def boot_id(self) -> str:
        """Boot id of the engine. Empty: no report has come."""
        return self.last.boot_id if self.last else ""

    @property
    def cached_blocks(self) -> int:
        """Blocks in the engine's prefix cache. 0: none, or the events of this boot have not come yet."""
        boot_id, blocks = self._cached
        return blocks if self.last is None or boot_id == self.last.boot_id else 0

    def take_cached(self, boot_id: str, blocks: int) -> bool:
        """Keep the number of cached blocks of the boot `boot_id`. Return True if it differs from the last one."""
        known, self._cached = self._cached, (boot_id, blocks)
        return self._cached != known

    def take(self, load: EngineLoad, now_s: float) -> bool:
        """Keep a report. Return True if it differs from the last one."""
        known, self.last = self.last, load
        self._reported_s = now_s
        return load != known

    def fresh(self, now_s: float) -> EngineLoad | None:
        """Return the report, or None if it is older than FRESH_S."""
        return self.last if now_s - self._reported_s <= FRESH_S else None

    def step_s(self, now_s: float) -> float:
        """Return the step duration that the engine reports. 0: unknown, or the engine runs no sequence."""
        load = self.fresh(now_s)
        return load.step_s if load is not None and load.sequences_running else 0.0
