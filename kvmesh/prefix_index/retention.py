"""Up to where the stream of cache events may be trimmed. Pure.

Entries carry the time of Redis. While that stands still, after a clock that ran ahead was put right, no entry grows old by
it, and the stream would grow by hours of events. What was the last entry when we looked `keep_s` ago is old by our own
clock, and so is all before: whatever the clock of Redis does, the stream reaches back twice as far and two looks at most.
"""

from __future__ import annotations

StreamId = tuple[int, int]


class Retention:
    """Keeps all that is younger than `keep_s` by both clocks. Ask more often than that."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._marked: StreamId = (0, 0)
        self._marked_s = float("-inf")
        self._old: StreamId = (0, 0)

    def oldest(self, last: StreamId, now_s: float) -> StreamId:
        """Return the first id that may still be needed. `last`: of the last entry now, (0, 0) if there is none."""
        if last < self._marked:  # a new Redis, which counts from less
            self._marked, self._marked_s, self._old = last, now_s, (0, 0)
        elif now_s - self._marked_s >= self._keep_s:
            self._old, self._marked, self._marked_s = self._marked, last, now_s
        return max((max(0, last[0] - int(self._keep_s * 1000)), 0), self._old)
