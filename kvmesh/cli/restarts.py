"""Decides whether a process that died is started again, and after which pause (exponential backoff). Pure."""

from __future__ import annotations

from collections import deque
from typing import Final

DEATHS_MAX: Final = 5
"""Deaths within PERIOD_S after which a process is given up (crash loop)."""
PERIOD_S: Final = 60.0
FIRST_S: Final = 0.1
"""Pause before the first start again. It doubles with each death in the period."""


class Restarts:
    """The deaths of one process."""

    def __init__(self) -> None:
        self._deaths: deque[float] = deque()

    def pause_s(self, now_s: float) -> float | None:
        """Note a death, and return the seconds until the next start. None: the process died too often."""
        while self._deaths and now_s - self._deaths[0] >= PERIOD_S:
            self._deaths.popleft()
        self._deaths.append(now_s)
        if len(self._deaths) >= DEATHS_MAX:
            return None
        return float(FIRST_S * 2 ** (len(self._deaths) - 1))
