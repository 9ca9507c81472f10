"""Holds the first requests of a frontend that has just started, until its routers are there.

A new frontend finds the routers one by one. Until each pool with a weight has a router, requests would be diverted to the
pool whose router was found first, be it the canary's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

CLOSED_S_MAX: Final = 2.0
"""Longest wait for the routers. A pool that has none by then is down, and its requests are diverted."""

CHECK_INTERVAL_S: Final = 0.01


class StartGate:
    """See the module. `has_each_pool()` is true if no new request has to be diverted. The gate opens once, for good."""

    def __init__(self, has_each_pool: Callable[[], bool]) -> None:
        self._has_each_pool = has_each_pool
        self._is_open = asyncio.Event()

    async def opened(self) -> None:
        """Return once requests may choose their pools."""
        await self._is_open.wait()

    async def run(self, wait_s: float = CLOSED_S_MAX) -> None:
        """Open the gate when each pool is there, or after `wait_s`. The snapshot of the mesh must be in force before."""
        try:
            async with asyncio.timeout(wait_s):
                while not self._has_each_pool():
                    await asyncio.sleep(CHECK_INTERVAL_S)
        except TimeoutError:
            log.warning("a pool with a weight has no router that can place: its requests are diverted")
        finally:
            self._is_open.set()
