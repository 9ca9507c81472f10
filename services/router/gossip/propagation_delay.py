"""Propagation delay of a gossip entry between routers, from its encoding until it is read. Pure.

A router reads its own entries from the same stream, and takes their delay for that of all entries. No clock of another
machine is compared, so clock skew does no harm.
"""

from __future__ import annotations

from collections import deque
from typing import Final

SAMPLES: Final = 9
"""The median of this many delays counts, so that one stall does not change it."""

IN_TRANSIT_MAX: Final = 4096
"""Entries in transit with a known time of sending."""


class PropagationDelay:
    """Measures the delay between the encoding and the reading of own entries. Some entries are never read."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """The present estimate of the delay; 0 before any entry was read."""
        self._sent: deque[tuple[int, float]] = deque(maxlen=IN_TRANSIT_MAX)
        self._samples: deque[float] = deque(maxlen=SAMPLES)

    def sent(self, seq: int, now_s: float) -> None:
        """Record that the entry `seq`, the highest so far, is encoded now."""
        self._sent.append((seq, now_s))

    def read(self, seq: int, now_s: float) -> None:
        """Record that the entry `seq` is read now. Earlier unread entries were lost; a second read is ignored."""
        while self._sent and self._sent[0][0] <= seq:
            number, sent_s = self._sent.popleft()
            if number == seq:
                self._samples.append(now_s - sent_s)
                self.seconds = sorted(self._samples)[len(self._samples) // 2]
