"""A virtual clock: a heap of events."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Time and its events, in order; equal times in the order of their making."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self._order = itertools.count()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, at_s: float, run: Callable[[], None]) -> None:
        """Run `run` at `at_s`."""
        heapq.heappush(self._heap, (max(at_s, self.now_s), next(self._order), run))

    def after(self, delay_s: float, run: Callable[[], None]) -> None:
        """Run `run` after `delay_s`."""
        self.at(self.now_s + delay_s, run)

    def run_until(self, until_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Run all events up to `until_s`, or until `is_over`."""
        heap = self._heap
        while heap and heap[0][0] <= until_s and not is_over():
            self.now_s, _, run = heapq.heappop(heap)
            run()
        if not is_over():
            self.now_s = max(self.now_s, until_s)
