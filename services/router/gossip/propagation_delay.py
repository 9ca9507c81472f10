"""How long an entry is under way between routers: from being encoded until it is read. Pure.

A router reads its own entries where it reads those of others, and takes the time that its own ones were under way for that
of all. So no clock of another machine matters.
"""

from __future__ import annotations

from collections import deque
from typing import Final

SAMPLES: Final = 9
"""The middle one of so many tells: one stall is not the rule."""

IN_TRANSIT_MAX: Final = 4096
"""Entries under way at once, of which the time is known."""


class PropagationDelay:
    """Hears of each own entry that is written, and that is read. Some are never read."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """What an entry takes, as of late; 0 before any was read."""
        self._sent: deque[tuple[int, float]] = deque(maxlen=IN_TRANSIT_MAX)
        self._samples: deque[float] = deque(maxlen=SAMPLES)

    def sent(self, seq: int, now_s: float) -> None:
        """The entry `seq`, the highest so far, is encoded now."""
        self._sent.append((seq, now_s))

    def read(self, seq: int, now_s: float) -> None:
        """The entry `seq` is read now. Those before it were lost, or it is read again."""
        while self._sent and self._sent[0][0] <= seq:
            number, sent_s = self._sent.popleft()
            if number == seq:
                self._samples.append(now_s - sent_s)
                self.seconds = sorted(self._samples)[len(self._samples) // 2]
