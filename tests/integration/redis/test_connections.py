"""The number of connections of a process to Redis."""

from __future__ import annotations

import asyncio

from kvmesh.redis_link import CONNECTIONS_MAX, RedisLink


async def test_many_commands_at_once_share_few_connections(redis_url: str) -> None:
    """Redis stalls and some hundred commands wait: all are answered, over at most the maximum of connections."""
    link, other = RedisLink(redis_url), RedisLink(redis_url)
    try:
        before = len((await other.execute("CLIENT", "LIST")).splitlines())
        await other.execute("CLIENT", "PAUSE", 300, "ALL")
        answers = await asyncio.gather(*(link.execute("ECHO", "here") for _ in range(300)))
        assert answers == [b"here"] * 300
        connections = len((await other.execute("CLIENT", "LIST")).splitlines()) - before
        assert 1 <= connections <= CONNECTIONS_MAX
    finally:
        await link.close()
        await other.close()
