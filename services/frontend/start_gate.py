"""Keeps a frontend that has just started from diverting requests, until it has found its routers.

A new frontend finds the routers one by one. Before the router of its own pool is up, a request would go to the pool whose
router was found first, be it the canary's. Until the gate opens, such a request waits for its own pool instead. A pool
whose router is up, and reports that it cannot place, is left at once.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvmesh.clock import Clock
from services.frontend.requests.core import FrontendCore

log = logging.getLogger(__name__)

WAIT_S: Final = 2.0
"""Longest wait for the other routers, from the first one on. A pool that has none by then is down."""

REQUEST_WAIT_S: Final = 4.0
"""Longest wait of a request for a router, however late the first one was found. At 5 s the client learns the version."""

CHECK_INTERVAL_S: Final = 0.02


class StartGate:
    """Decides when a frontend that has just started may divert requests. Once open, it stays open.

    Without any router it stays closed: nothing could be diverted.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._first_s: float | None = None
        """Time since which some router can place."""

    def check(
        self, now_s: float, *, has_router: bool, is_complete: bool, request_wait_s: float = 0.0
    ) -> bool:
        """Take the present state, and return `is_open`.

        `has_router`: some router can place. `is_complete`: each pool that the weights may choose has a router that is up.
        `request_wait_s`: longest wait for a router of a request that another pool may serve.
        """
        if not has_router:
            self._first_s = None
        elif self._first_s is None:
            self._first_s = now_s
        is_over = self._first_s is not None and now_s - self._first_s >= WAIT_S
        if is_complete or is_over or (has_router and request_wait_s >= REQUEST_WAIT_S):
            self.is_open = True
        return self.is_open


async def hold_diversions(
    core: FrontendCore, clock: Clock, check_interval_s: float = CHECK_INTERVAL_S
) -> None:
    """Let `core` divert nothing until the gate opens. The snapshot of the mesh must be in force before."""
    gate, pools = StartGate(), core.pools
    pools.may_divert = False
    while not gate.check(
        now_s := clock.now_s(),
        has_router=any(core.peers.placeable()) or core.regions.takes_new,  # the own region may be dead
        is_complete=not pools.unfound,
        request_wait_s=core.router_wait_s(now_s),
    ):
        await asyncio.sleep(check_interval_s)
    if pools.unfound:
        log.warning("no router of %s was found: other pools take their requests", ", ".join(pools.unfound))
    core.allow_diversions(clock.now_s())
