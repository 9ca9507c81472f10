"""Times of tests in seconds of a quiet machine: a test fails once something hangs or waits, and not because others compute.

A second in which a process of the machine waits for a processor counts SHARE of a second. Linux counts such time as
pressure stall information. Where it is missing, each second counts whole. Waits for disks, and for the hosts of virtual
machines, count whole, too. The processes of a test count as others do, so a cost is better told in counts or CPU time.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")

SHARE: Final = 0.2
"""A bound of 5 s ends a wait after 25 s on a machine that is busy all the time."""

_PRESSURE: Final = Path("/proc/pressure/cpu")


class Pressure:
    """The time in which a process of the machine waited for a processor, since the machine started."""

    def __init__(self, path: Path = _PRESSURE) -> None:
        """Open the counter, and keep it open: a reading that failed later could not be compared with the others."""
        self._descriptor: int | None = None
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            if b"total=" in os.pread(descriptor, 200, 0):
                self._descriptor = descriptor
            else:
                os.close(descriptor)

    def stalled_s(self) -> float:
        """Return the seconds; always 0 on a machine that does not count them."""
        if self._descriptor is None:
            return 0.0
        # some avg10=0.00 avg60=1.26 avg300=28.02 total=25487098055
        first = os.pread(self._descriptor, 200, 0).split(b"\n", 1)[0]
        return int(first.rpartition(b"total=")[2]) / 1e6


_pressure = Pressure()


def quiet_s() -> float:
    """Return the time of a clock that runs slowly while the machine is busy. Two readings can be compared."""
    return time.monotonic() - (1 - SHARE) * _pressure.stalled_s()


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


async def wait_for(awaitable: Awaitable[T], bound_s: float) -> T:
    """Return the result. Raises TimeoutError after `bound_s` seconds of a quiet machine."""
    async with patience(bound_s):
        return await awaitable
