"""Whether a frontend is worth sending requests to: not while it has had no router for longer than a restart takes.

Pure in `Readiness`; `follow_routers` is the shell. What runs at the frontend goes on all the same, and so do its requests:
this is what load balancers hear (architecture, section 9: readiness flips on evidence).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from kvmesh.clock import Clock
from services.frontend.requests.retry_state import ROUTER_WAIT_S
from services.frontend.requests.router_peers import Peers

CHECK_INTERVAL_S: Final = 0.1


class Readiness:
    """Slow to turn and quick to come back: requests wait for a router as long, so its restart costs no frontend."""

    def __init__(self) -> None:
        self.is_ready = True
        self._without_since_s: float | None = None
        """When it was first seen that no router is there."""

    def check(self, now_s: float, *, has_router: bool) -> bool:
        """Take what is there now; return whether `is_ready` turned."""
        before = self.is_ready
        if has_router:
            self._without_since_s, self.is_ready = None, True
        elif self._without_since_s is None:
            self._without_since_s = now_s
        elif now_s - self._without_since_s >= ROUTER_WAIT_S:
            self.is_ready = False
        return self.is_ready is not before


async def follow_routers(
    peers: Peers[Any],
    clock: Clock,
    tell: Callable[[bool], Awaitable[None]],
    check_interval_s: float = CHECK_INTERVAL_S,
) -> None:
    """Tell of every turn until cancelled."""
    readiness = Readiness()
    while True:
        if readiness.check(clock.now_s(), has_router=any(peer.link.is_up for peer in peers)):
            await tell(readiness.is_ready)
        await asyncio.sleep(check_interval_s)
