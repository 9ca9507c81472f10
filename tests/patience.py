"""Times of tests in seconds of a quiet machine: a test fails once something hangs or waits, and not because others compute.

A second in which a process of the machine waits for a processor counts SHARE of a second. Linux counts such time as
pressure stall information. Where it is missing, each second counts whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

SHARE: Final = 0.2
"""A bound of 5 s ends a wait after 25 s on a machine that is busy all the time."""

_PRESSURE: Final = Path("/proc/pressure/cpu")


def quiet_s() -> float:
    """Return the time of a clock that runs slowly while the machine is busy. Two readings of one boot can be compared."""
    stalled_s = 0.0
    with suppress(OSError, ValueError):
        # some avg10=0.00 avg60=1.26 avg300=28.02 total=25487098055
        stalled_s = int(_PRESSURE.read_text().split("\n", 1)[0].rpartition("total=")[2]) / 1e6
    return time.monotonic() - (1 - SHARE) * stalled_s


class Patience:
    """The bound of a wait that begins now, in seconds of a quiet machine."""

    def __init__(self, bound_s: float) -> None:
        self._end_s = quiet_s() + bound_s

    @property
    def left_s(self) -> float:
        """The seconds that the wait still has; at most 0 once it is over."""
        return self._end_s - quiet_s()

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0


@asynccontextmanager
async def patience(bound_s: float) -> AsyncIterator[None]:
    """Raise TimeoutError if the block takes longer than `bound_s` seconds of a quiet machine."""
    loop = asyncio.get_running_loop()
    bound = Patience(bound_s)
    handle: asyncio.TimerHandle
    async with asyncio.timeout(None) as timeout:

        def look() -> None:
            nonlocal handle
            if bound.is_over:
                timeout.reschedule(loop.time())
            else:
                handle = loop.call_later(bound.left_s, look)

        handle = loop.call_later(bound_s, look)
        try:
            yield
        finally:
            handle.cancel()
