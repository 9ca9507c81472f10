"""Listener of a frontend whose region is drained: closed after DRAIN_S, opened at once, never without another region."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from kvmesh.server import ListenError
from kvmesh.snapshot.content import Content, PoolTrack, Track
from kvmesh.snapshot.regions import RegionEntry
from services.frontend.region_listener import DRAIN_S, DRAINED, RegionListener, follow_drain, is_drained


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


def test_only_weight_0_beside_another_region_is_a_drain() -> None:
    """Without regions, with a weight, or as the last region with load, the listener stays open."""
    own, other = RegionEntry("eu", weight_percent=0), RegionEntry("us")
    content = Content((PoolTrack("default", "v1", Track.STABLE, 100),))
    assert not is_drained(content, "eu")
    assert is_drained(replace(content, regions=(own, other)), "eu")
    assert not is_drained(replace(content, regions=(replace(own, weight_percent=1), other)), "eu")
    assert not is_drained(replace(content, regions=(own, replace(other, weight_percent=0))), "eu")


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
    async with asyncio.timeout(10):
        while server.now_s < 40:
            await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert server.calls == [DRAINED, "open", "open"] and server.is_open
