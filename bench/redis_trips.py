"""The least cost of a round trip to Redis: client library, bare protocol, and kvmesh's connection."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import hiredis
import redis.asyncio

from kvmesh.redis_link import RedisLink
from kvmesh.redis_script import Script

NOTHING = Script("return 1")
WARM = 100


class _Bare(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader()
        self.transport: Any = None
        self.answer: asyncio.Future[object] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        answer = self._reader.gets()
        if answer is not False and self.answer is not None:
            self.answer.set_result(answer)


async def measure(redis_url: str, trips: int) -> dict[str, dict[str, float]]:
    """Return median latency and CPU of an empty script's round trip for each client, in microseconds."""
    link = RedisLink(redis_url)
    client: Any = redis.asyncio.Redis.from_url(redis_url, protocol=2)
    loop, place = asyncio.get_running_loop(), urlsplit(redis_url)
    _, bare = await loop.create_connection(_Bare, place.hostname or "", place.port or 6379)
    words: Any = ("EVALSHA", NOTHING.digest, 0)
    packed = hiredis.pack_command(words)

    async def by_library() -> None:
        await client.execute_command("EVALSHA", NOTHING.digest, 0)

    async def by_protocol() -> None:
        bare.answer = loop.create_future()
        bare.transport.write(packed)
        await bare.answer

    async def by_link() -> None:
        await link.scripts(NOTHING, [((), ())])

    try:
        await by_link()  # this loads the script
        return {
            "redis-py": await _measure(by_library, trips),
            "a bare protocol": await _measure(by_protocol, trips),
            "kvmesh's connection": await _measure(by_link, trips),
        }
    finally:
        bare.transport.abort()
        await client.aclose()
        await link.close()


async def _measure(trip: Callable[[], Awaitable[None]], trips: int) -> dict[str, float]:
    for _ in range(WARM):
        await trip()
    latencies = []
    cpu_ns = time.process_time_ns()
    for _ in range(trips):
        began_ns = time.perf_counter_ns()
        await trip()
        latencies.append(time.perf_counter_ns() - began_ns)
        await asyncio.sleep(0)
    cpu_us = (time.process_time_ns() - cpu_ns) / 1e3 / trips
    return {"latency_us": statistics.median(latencies) / 1e3, "cpu_us": cpu_us}
