"""Closes the listener of a frontend in a drained region, and opens it again after the restore.

A running client keeps its connections whatever name resolution says. So the end of a declared drain does not rely on it: at
weight 0 for DRAIN_S the frontend takes no more connections and sends GOAWAY. Streams run on. `RegionListener` decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

from kvmesh.clock import Clock
from kvmesh.server import ListenError

log = logging.getLogger(__name__)

DRAIN_S: Final = 5.0
"""Time at weight 0 until the listener is closed: a step of the declared ramp, in which clients that ask anew have gone."""

CHECK_INTERVAL_S: Final = 0.5

DRAINED: Final = "the region is drained: its operator moved its callers to other regions"
"""Reason that health checks get."""


class Listener(Protocol):
    """The part of a MeshServer that is used here."""

    @property
    def is_open(self) -> bool: ...

    async def close_listener(self, reason: str) -> None: ...

    async def open_listener(self) -> None: ...


class RegionListener:
    """Decides whether the listener is open: closed after DRAIN_S of a drain, opened at once after it."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        """Time at which the drain was first seen. None: no drain."""

    def is_wanted(self, now_s: float, *, is_drained: bool) -> bool:
        """Take the present state, and return True if the listener has to be open."""
        if not is_drained:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        return self._since_s is None or now_s - self._since_s < DRAIN_S


async def follow_drain(
    server: Listener,
    is_drained: Callable[[], bool],
    clock: Clock,
    check_interval_s: float = CHECK_INTERVAL_S,
) -> None:
    """Close and open the listener of `server` with the drains of the region, until cancelled."""
    decision = RegionListener()
    while True:
        if not decision.is_wanted(clock.now_s(), is_drained=is_drained()):
            if server.is_open:
                log.info("listener closed: the region is drained")
                await server.close_listener(DRAINED)
        elif not server.is_open:
            await _open(server)
        await asyncio.sleep(check_interval_s)


async def _open(server: Listener) -> None:
    """Open the listener, or log why it stays closed; the next check tries again."""
    try:
        await server.open_listener()
    except ListenError as error:
        log.warning("the listener stays closed: %s", error)
        return
    log.info("listener opened: the region is not drained, or no other one has a weight")
