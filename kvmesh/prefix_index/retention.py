"""Decides up to which entry the stream of cache events may be trimmed. Pure.

The id of an entry is the time of Redis. If the clock of Redis was ahead and is corrected, new ids stand still until the
clock has caught up. By that clock no entry ages in this time, and the stream would grow by hours of events. The local
clock therefore counts too: the last entry of a call is old `keep_s` later, and so are all entries before it. With any
clock of Redis, the stream reaches back at most 2 `keep_s` and two intervals between calls.
"""

from __future__ import annotations

StreamId = tuple[int, int]


class Retention:
    """Keeps all entries younger than `keep_s` by both clocks. INVARIANT: calls are less than `keep_s` apart."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._marked: StreamId = (0, 0)
        self._marked_s = float("-inf")
        self._old: StreamId = (0, 0)

    def oldest(self, last: StreamId, now_s: float) -> StreamId:
        """Return the first id that may still be needed. `last`: id of the last entry now, (0, 0) if there is none."""
        if last < self._marked:  # a new Redis, which counts from less
            self._marked, self._marked_s, self._old = last, now_s, (0, 0)
        elif now_s - self._marked_s >= self._keep_s:
            self._old, self._marked, self._marked_s = self._marked, last, now_s
        return max((max(0, last[0] - int(self._keep_s * 1000)), 0), self._old)
