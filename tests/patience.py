"""Bounds of the waits of tests: a wait ends with an error once something hangs, and not because the machine is busy.

A second in which a process of the machine waits for a processor counts SHARE of a second. Linux counts such time as
pressure stall information. Where it is missing, each second counts whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

SHARE: Final = 0.2
"""A bound of 5 s ends a wait after 25 s on a machine that is busy all the time."""

_PRESSURE: Final = Path("/proc/pressure/cpu")


def stalled_s() -> float:
    """Return the seconds since the start of the machine in which a process waited for a processor; 0 if unknown."""
    with suppress(OSError, ValueError, IndexError):
        # some avg10=0.00 avg60=1.26 avg300=28.02 total=25487098055
        return int(_PRESSURE.read_text().split("\n", 1)[0].rpartition("total=")[2]) / 1e6
    return 0.0


class Patience:
    """The bound of a wait that begins now."""

    def __init__(
        self,
        bound_s: float,
        now_s: Callable[[], float] = time.monotonic,
        stalled_s: Callable[[], float] = stalled_s,
    ) -> None:
        """`bound_s`: seconds that the wait may take on a quiet machine."""
        self._bound_s = bound_s
        self._now_s = now_s
        self._stalled_s = stalled_s
        self._began_s = now_s()
        self._stalled_before_s = stalled_s()

    def left_s(self) -> float:
        """Return the seconds that the wait still has; at most 0 once it is over."""
        waited_s = self._now_s() - self._began_s
        stalled_s = min(max(0.0, self._stalled_s() - self._stalled_before_s), waited_s)
        return self._bound_s - waited_s + (1 - SHARE) * stalled_s

    @property
    def is_over(self) -> bool:
        return self.left_s() <= 0


@asynccontextmanager
async def patience(bound_s: float) -> AsyncIterator[None]:
    """Raise TimeoutError if the block takes longer than `bound_s` seconds of a quiet machine."""
    loop = asyncio.get_running_loop()
    bound = Patience(bound_s)
    async with asyncio.timeout(None) as timeout:

        def look() -> None:
            nonlocal handle
            left_s = bound.left_s()
            if left_s <= 0:
                timeout.reschedule(loop.time())
            else:
                handle = loop.call_later(left_s, look)

        handle = loop.call_later(bound_s, look)
        try:
            yield
        finally:
            handle.cancel()
