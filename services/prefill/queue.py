"""The order in which released work goes to the engine. Pure.

Higher priority first, shadows behind everybody, resumed attempts at the head of their band, then first come, first
served. Whoever wants another order changes `rank` alone.
"""

from __future__ import annotations

import heapq
from typing import Final

from services.prefill.slot import Slot

Rank = tuple[bool, int, bool, int]

_COMPACT_MIN: Final = 64


def rank(slot: Slot, arrival: int) -> Rank:
    """Return what slots are ordered by, smallest first; `arrival` counts the pushes."""
    return (slot.is_shadow, -slot.priority, not slot.is_resumed, arrival)


class PrefillQueue:
    """Slots that wait. Bounded by `requests_max`: ask `is_full` before `push`."""

    def __init__(self, requests_max: int) -> None:
        self.requests_max = requests_max
        self.tokens = 0
        """Prompt tokens of those that wait."""
        self._heap: list[tuple[Rank, Slot]] = []
        self._waiting: set[Slot] = set()
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._waiting

    def is_full(self) -> bool:
        """True if nothing more may be pushed."""
        return len(self._waiting) >= self.requests_max

    def push(self, slot: Slot) -> None:
        """Add `slot`. Raises ValueError if the queue is full."""
        if self.is_full():
            raise ValueError(f"queue full: {len(self)}/{self.requests_max}")
        self._arrivals += 1
        self._waiting.add(slot)
        self.tokens += slot.prompt_tokens
        heapq.heappush(self._heap, (rank(slot, self._arrivals), slot))

    def head(self) -> Slot | None:
        """Return the slot to run next, or None. It stays."""
        while self._heap and self._heap[0][1] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, slot: Slot) -> None:
        """Take `slot` out; one that does not wait is ignored."""
        if slot not in self._waiting:
            return
        self._waiting.remove(slot)
        self.tokens -= slot.prompt_tokens
        if len(self._heap) > _COMPACT_MIN + 4 * len(self._waiting):
            self._heap = [entry for entry in self._heap if entry[1] in self._waiting]
            heapq.heapify(self._heap)
