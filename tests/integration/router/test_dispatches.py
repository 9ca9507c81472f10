"""Gossip of dispatches between two routers, over a real Redis."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvmesh.clock import Clock, MonotonicClock
from kvmesh.redis_dedicated import DedicatedRedis
from kvmesh.redis_dedicated_link import DedicatedLink
from kvmesh.redis_link import RedisLink
from services.router.gossip.dispatch_gossip import ENTRIES_MAX, STREAM_TTL_S, DispatchGossip
from services.router.gossip.peer_routers import known_dispatches
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.cost_policy import CostPolicy
from services.router.placement.policy import Dispatched, Finished, Hit, Started
from tests.patience import patience


class Side:
    """One router's policy and its dispatches."""

    def __init__(
        self, url: str, name: str, link: RedisLink | None = None, clock: Clock | None = None
    ) -> None:
        self.link = link or RedisLink(url)
        self.policy = CostPolicy(
            name,
            LocalPrefixIndex(),
            random.Random(1),
            block_tokens=4,
            dispatch_ahead_s=1.0,
            local_prefill_tokens_max=0,
        )
        self.policy.local_index.add("prefill-0")
        self.dispatches = DispatchGossip(
            self.link,
            "m",
            name,
            f"boot-{name}",
            self.policy.observe,
            known_dispatches(self.policy.backlog),
            lambda replica: replica == "prefill-0",
            clock,
        )
        self.task = asyncio.create_task(self.dispatches.run())

    async def close(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        await self.link.close()


async def until(condition: Callable[[], bool]) -> None:
    async with patience(10):
        while not condition():
            await asyncio.sleep(0.002)


async def test_dispatches_of_another_router_count_until_they_finish_or_it_dies(redis_server: Any) -> None:
    """They count as in-flight blocks and as backlog here. A finish removes them and reports the hit; a death removes
    the rest.
    """
    one, two = Side(redis_server.url, "router-0"), Side(redis_server.url, "router-1")
    everybody = [("router-0", "boot-router-0"), ("router-1", "boot-router-1")]
    for side in (one, two):
        side.dispatches.set_routers(everybody)
    a, b = "a" * 32, "b" * 32
    now_s = 5.0
    heard = False
    while not heard:  # until the other side's reader has its position in the stream
        one.dispatches.publish(Dispatched("router-0", a, "prefill-0", (1, 2, 3), 0.5, now_s, now_s + 60))
        with suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                await until(lambda: len(two.policy.backlog) == 1)
                heard = True
    assert two.policy.local_index.matched((1, 2, 3)) == {"prefill-0": 3}
    one.dispatches.publish(Dispatched("router-0", b, "prefill-0", (7,), 0.25, now_s, now_s + 60))
    one.dispatches.publish(Started("router-0", a, now_s))
    await until(lambda: len(two.policy.backlog) == 2)
    one.dispatches.publish(Finished("router-0", a, now_s, Hit(8, 4, 2, 0.5)))
    await until(lambda: len(two.policy.backlog) == 1)
    assert two.policy.local_index.blocks_of("prefill-0") == 3
    assert two.policy.backlog.queue_s("prefill-0", 1.0, 1e9) == 0.25
    assert len(one.policy.backlog) == 0, "own gossip messages count for no other router"
    two.dispatches.set_routers([("router-1", "boot-router-1")])
    assert len(two.policy.backlog) == 0
    list(two.policy.local_index.maintain())
    assert two.policy.local_index.in_flight_block_count == 0
    two.policy.assert_consistent()
    await one.close()
    await two.close()


class SlowWrites(DedicatedLink):
    """Writes take 0.1 s."""

    async def execute(self, *command: Any) -> Any:
        if command[0] == "XADD":
            await asyncio.sleep(0.1)
        return await super().execute(*command)


class SlowLink(RedisLink):
    """Writes of its dedicated connections take 0.1 s."""

    def dedicated(self) -> DedicatedLink:
        return SlowWrites(DedicatedRedis(self._client), self._guarded, self.execute)


class JumpingClock(MonotonicClock):
    """A clock that may be set forward."""

    ahead_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s


async def test_propagation_delay_is_measured_on_own_messages(redis_server: Any) -> None:
    """A write of 0.1 s is the propagation delay for other routers."""
    side = Side(redis_server.url, "router-0", SlowLink(redis_server.url))
    side.dispatches.set_routers([("router-0", "boot-router-0"), ("router-1", "boot-router-1")])
    await until(lambda: side.dispatches.exchange.propagation_delay.seconds >= 0.1)
    assert side.dispatches.exchange.propagation_delay.seconds < 1.0
    await side.close()


async def test_the_stream_is_bounded_though_its_entries_do_not_age(redis_server: Any) -> None:
    """The clock of Redis was once an hour ahead: until that hour has passed all entries are as young as the last one."""
    clock = JumpingClock()
    side = Side(redis_server.url, "router-0", clock=clock)
    await side.link.execute("XADD", "m:dispatches", f"{round(time.time() + 3600) * 1000}-0", "b", b"x")
    side.dispatches.set_routers([("router-0", "boot-router-0"), ("router-1", "boot-router-1")])
    await until(lambda: side.dispatches.exchange.propagation_delay.seconds > 0)
    for _ in range(3):
        await side.link.pipeline([("XADD", "m:dispatches", "*", "c", b"")] * 5000)
    clock.ahead_s = STREAM_TTL_S
    async with patience(10):
        while await side.link.execute("XLEN", "m:dispatches") > 1.1 * ENTRIES_MAX:
            await asyncio.sleep(0.01)
    await side.close()


async def test_the_stream_goes_when_no_router_is_left(redis_server: Any) -> None:
    """All keys that a mesh leaves in Redis expire."""
    side = Side(redis_server.url, "router-0")
    side.dispatches.set_routers([("router-0", "boot-router-0"), ("router-1", "boot-router-1")])
    try:
        async with patience(10):
            while not 0 < await side.link.execute("TTL", "m:dispatches") <= STREAM_TTL_S:
                await asyncio.sleep(0.01)
    finally:
        await side.close()
