"""Graceful shutdown of a frontend: it refuses new requests, hands over streams that can move, and waits for the rest.

A shell. A client that reports the ability continues at another frontend at once, and takes over its running attempt there.
No token is computed again, and a restart takes seconds. Other clients keep their stream until it ends or the drain ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kvmesh.clock import Clock
from services.frontend.requests.core import FrontendCore

CHECK_INTERVAL_S: Final = 0.05
BATCH: Final = 32
"""Streams handed over in one step, because their takeovers arrive together."""


async def drain(core: FrontendCore, clock: Clock, has_other: Callable[[], bool], timeout_s: float) -> None:
    """Return when no client is left; after `timeout_s` the last ones are told to continue elsewhere."""
    core.is_draining = True
    until_s = clock.now_s() + timeout_s
    while core.admitted.serving or core.admitted.leaving or core.admitted.has_handlers:
        now_s = clock.now_s()
        if now_s >= until_s:
            core.hand_over(list(core.admitted.serving), now_s)
            return
        if has_other():
            # A request that still waits for its first token keeps its position in the queue.
            movable = [
                each
                for each in core.admitted.serving
                if each.spec.execution.can_move and each.location is not None
            ]
            core.hand_over(movable[:BATCH], now_s)
        await asyncio.sleep(CHECK_INTERVAL_S)
