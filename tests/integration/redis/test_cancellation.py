"""Cancelled tasks with a Redis command end, at any moment of the cancellation."""

from __future__ import annotations

import asyncio

from kvmesh.redis_link import RedisLink
from kvmesh.redis_script import Script


async def test_no_cancel_is_lost(redis_url: str) -> None:
    """After a cancellation at any turn of the event loop, a command never returns normally."""
    link = RedisLink(redis_url)
    try:
        await link.execute("PING")
        for commands in ("execute", "pipeline", "scripts"):
            for turns in range(60):

                async def talk(commands: str = commands) -> None:
                    if commands == "execute":
                        await link.execute("PING")
                    elif commands == "scripts":
                        await link.scripts(Script("return 1"), [((), ())])
                    else:
                        await link.pipeline([("PING",), ("PING",)])

                task = asyncio.create_task(talk())
                for _ in range(turns % 12):
                    await asyncio.sleep(0)
                if not task.done():
                    task.cancel()
                    await asyncio.wait([task], timeout=60)
                    assert task.cancelled(), f"{commands} cancelled after {turns % 12} turns"
    finally:
        await link.close()
