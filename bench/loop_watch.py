"""Measures stalls of an event loop."""

from __future__ import annotations

import asyncio
import time


class LoopWatch:
    """Runs every `period_s`; the delay beyond that is a stall of the event loop."""

    def __init__(self, period_s: float) -> None:
        self.longest_s = 0.0
        self.busiest_s = 0.0
        """Most CPU time of the thread in one period: a stall without the time that other processes took on the core."""
        self._period_s = period_s

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            wanted_s, cpu_s = time.monotonic() + self._period_s, time.thread_time()
            await asyncio.sleep(self._period_s)
            self.longest_s = max(self.longest_s, time.monotonic() - wanted_s)
            self.busiest_s = max(self.busiest_s, time.thread_time() - cpu_s)
