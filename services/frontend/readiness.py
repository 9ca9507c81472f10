"""Readiness of a frontend: not ready after ROUTER_WAIT_S without a router of the stable pool, or one that can place.

`Readiness` decides, `follow_routers` reports. Load balancers read the readiness as health check. Admitted requests
continue while the frontend is not ready.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from kvmesh.clock import Clock
from services.frontend.requests.retry_state import ROUTER_WAIT_S

CHECK_INTERVAL_S: Final = 0.1

NO_ROUTER: Final = "no router of the stable pool is up, and no router of another pool can place requests"
"""Reason that health checks get."""


class Readiness:
    """Readiness with hysteresis: lost after ROUTER_WAIT_S without a router, regained at once.

    A request that no engine took waits for a router for the same time. A router that restarts within this time makes no
    frontend unready.
    """

    def __init__(self) -> None:
        self.is_ready = True
        self._without_since_s: float | None = None
        """Time at which the loss of the last router was first seen."""

    def check(self, now_s: float, *, has_router: bool) -> bool:
        """Take the present state; return True if `is_ready` changed."""
        before = self.is_ready
        if has_router:
            self._without_since_s, self.is_ready = None, True
        elif self._without_since_s is None:
            self._without_since_s = now_s
        elif now_s - self._without_since_s >= ROUTER_WAIT_S:
            self.is_ready = False
        return self.is_ready is not before


async def follow_routers(
    has_router: Callable[[], bool],
    clock: Clock,
    tell: Callable[[bool, str], Awaitable[None]],
    check_interval_s: float = CHECK_INTERVAL_S,
) -> None:
    """Report every change of readiness to `tell`, with NO_ROUTER as the reason of a loss, until cancelled."""
    readiness = Readiness()
    while True:
        if readiness.check(clock.now_s(), has_router=has_router()):
            await tell(readiness.is_ready, "" if readiness.is_ready else NO_ROUTER)
        await asyncio.sleep(check_interval_s)
