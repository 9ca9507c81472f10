"""Listener of a frontend whose region is drained: closed after DRAIN_S, opened at once, never without another region."""

from __future__ import annotations

import asyncio
import contextlib

from kvmesh.server import ListenError
from services.frontend.region_listener import DRAIN_S, DRAINED, RegionListener, follow_drain
from tests.patience import patience


def test_a_drain_closes_after_its_time_and_a_restore_opens_at_once() -> None:
    """A weight in between starts the time anew."""
    listener = RegionListener()
    assert listener.is_wanted(0.0, is_drained=False)
    assert listener.is_wanted(1.0, is_drained=True)
    assert listener.is_wanted(1.0 + 0.9 * DRAIN_S, is_drained=True)
    assert listener.is_wanted(2.0 + DRAIN_S, is_drained=False)
    assert listener.is_wanted(3.0 + DRAIN_S, is_drained=True)
    assert not listener.is_wanted(3.0 + 2 * DRAIN_S, is_drained=True)
    assert listener.is_wanted(4.0 + 2 * DRAIN_S, is_drained=False)


class Server:
    """A listener whose address is taken once when it opens."""

    def __init__(self) -> None:
        self.is_open = True
        self.refusals = 1
        self.calls: list[str] = []
        self.now_s = 0.0

    async def close_listener(self, reason: str) -> None:
        self.is_open = False
        self.calls.append(reason)

    async def open_listener(self) -> None:
        self.calls.append("open")
        if self.refusals:
            self.refusals -= 1
            raise ListenError("in use")
        self.is_open = True


async def test_the_listener_follows_the_drain_and_a_taken_address_is_tried_again() -> None:
    """Each change is made once; a failure to open is repeated with the next check."""
    server = Server()

    class Clock:
        def now_s(self) -> float:
            server.now_s += 1.0
            return server.now_s

    task = asyncio.create_task(follow_drain(server, lambda: 10 < server.now_s < 30, Clock(), 0.0))
    async with patience(10):
        while server.now_s < 40:
            await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert server.calls == [DRAINED, "open", "open"] and server.is_open
