"""Keeps a frontend that has just started from diverting requests, until it has found its routers.

A new frontend finds the routers one by one. Before the router of its own pool is up, a request would go to the pool whose
router was found first, be it the canary's. Until the gate opens, such a request waits for its own pool instead.
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

CHECK_INTERVAL_S: Final = 0.02


class StartGate:
    """Decides when a frontend that has just started may divert requests. Once open, it stays open.

    Without any router it stays closed: nothing could be diverted.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._first_s: float | None = None
        """Time at which the first router was seen."""

    def check(self, now_s: float, *, has_router: bool, is_complete: bool) -> bool:
        """Take the present state, and return `is_open`.

        `has_router`: some router can place. `is_complete`: each pool that the weights may choose can place.
        """
        if has_router and self._first_s is None:
            self._first_s = now_s
        if is_complete or (self._first_s is not None and now_s - self._first_s >= WAIT_S):
            self.is_open = True
        return self.is_open


async def hold_diversions(
    core: FrontendCore, clock: Clock, check_interval_s: float = CHECK_INTERVAL_S
) -> None:
    """Let `core` divert nothing until the gate opens. The snapshot of the mesh must be in force before."""
    gate, pools = StartGate(), core.pools
    pools.may_divert = False
    while not gate.check(
        clock.now_s(), has_router=any(core.peers.placeable()), is_complete=not pools.unplaceable
    ):
        await asyncio.sleep(check_interval_s)
    if pools.unplaceable:
        names = ", ".join(pools.unplaceable)
        log.warning("no router can place requests of the pools %s: they may go to other pools", names)
    core.allow_diversions(clock.now_s())
