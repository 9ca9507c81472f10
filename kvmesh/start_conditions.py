"""The named conditions of a starting process: it serves once all of them hold, or once the wait is over. Pure.

A condition may be lost again before the others hold. The wait is bounded: a process that serves cold is better than none.
State machine: WAITING -> OVER. An over wait stays over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

START_WAIT_S: Final = 2.0
"""Longest wait of a start. An event that renews the wait gives it this time once more."""


class StartConditions:
    """The conditions of one start. INVARIANT: the wait ends at most 2 * START_WAIT_S after `began_s`."""

    def __init__(self, names: Sequence[str], began_s: float, *, renewed_by: str = "") -> None:
        """`names`: the conditions, as health checks print them. Times in seconds of the owner's clock.

        `renewed_by`: the condition that starts the wait anew when it holds for the first time. Empty: none.
        """
        assert names, "a start has at least one condition"
        assert not renewed_by or renewed_by in names, renewed_by
        self.is_over = False
        self._began_s = began_s
        self._until_s = began_s + START_WAIT_S
        self._renewed_by = renewed_by
        self._is_renewed = not renewed_by
        self._met_s: dict[str, float | None] = dict.fromkeys(names)
        """Time since which each condition holds. None: it does not hold."""

    def __repr__(self) -> str:
        return f"StartConditions({'over' if self.is_over else 'waiting'}, unmet: {', '.join(self.unmet) or 'none'})"

    def check(self, now_s: float, holds: Mapping[str, bool]) -> bool:
        """Take the present state of each condition, and return `is_over`."""
        if self.is_over:
            return True
        for name, met_s in self._met_s.items():
            if not holds[name]:
                self._met_s[name] = None
            elif met_s is None:
                self._met_s[name] = now_s
        if not self._is_renewed and holds[self._renewed_by]:
            self._is_renewed, self._until_s = True, now_s + START_WAIT_S
        self.is_over = not self.unmet or now_s >= self._until_s
        return self.is_over

    @property
    def names(self) -> list[str]:
        """All conditions."""
        return list(self._met_s)

    @property
    def unmet(self) -> list[str]:
        """The conditions that do not hold. After an over wait: those without which the process serves."""
        return [name for name, met_s in self._met_s.items() if met_s is None]

    def reason(self) -> str:
        """Return the reason why the process does not serve yet; empty once the wait is over."""
        return "" if self.is_over else f"starting: waits for {', '.join(self.unmet)}"

    def seconds(self, name: str) -> float:
        """Return the seconds from the begin of the start until `name` held; 0: it does not hold."""
        met_s = self._met_s[name]
        return 0.0 if met_s is None else met_s - self._began_s

    def durations(self) -> dict[str, float]:
        """Return the seconds of each condition that holds, rounded to milliseconds, for a log line."""
        return {name: round(self.seconds(name), 3) for name in self._met_s if name not in self.unmet}
