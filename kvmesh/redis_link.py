"""The process's connection to Redis: opened on first use, opened again after it broke, never retried behind the back.

A shell. Commands stay within Redis 6.2. Keys of a mesh start with its name: `key("kvmesh", "proc", "decode-0")`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
"""A Redis that does not answer a command within this is away. Blocking reads ask for less."""

Command = Sequence[str | bytes | int | float]
Answer = TypeVar("Answer")


class RedisAway(Exception):
    """Redis cannot be reached or takes no commands now. Go on with what is known and try again later."""


def key(mesh: str, *parts: str) -> str:
    """Return the Redis key of `mesh` named by `parts`."""
    return ":".join((mesh, *parts))


class RedisLink:
    """Connections to one Redis, shared by all tasks of the process. `close` it before the loop ends.

    Every method raises RedisAway when Redis is not there; nothing is retried, so that the caller knows what was lost.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_connected = False
        """True if the last command was answered."""
        self.break_total = 0
        """Times the connection was lost."""
        self._client = redis.asyncio.Redis.from_url(
            url,
            decode_responses=False,
            protocol=2,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )

    async def execute(self, *command: str | bytes | int | float) -> Any:
        """Run one command and return its answer. Raises ResponseError where the command itself is wrong."""
        return await self._watch(self._client.execute_command(*command))  # type: ignore[no-untyped-call]  # the library left it out

    async def pipeline(self, commands: Sequence[Command], *, atomic: bool = False) -> list[Any]:
        """Run `commands` in one round trip (`atomic`: as one MULTI) and return their answers in order.

        If Redis goes away in the middle, some of them may have run.
        """
        pipe = self._client.pipeline(transaction=atomic)
        for command in commands:
            pipe.execute_command(*command)
        answers = await self._watch(pipe.execute())
        return list(answers)

    def subscription(self) -> Any:
        """Return a fresh redis.asyncio PubSub; the caller awaits its `aclose`. Wrap its calls in `watch`."""
        return self._client.pubsub(ignore_subscribe_messages=True)

    async def watch(self, awaitable: Awaitable[Answer]) -> Answer:
        """Await a call of the client library; its errors of connection become RedisAway."""
        return await self._watch(awaitable)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _watch(self, awaitable: Awaitable[Answer]) -> Answer:
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        try:
            answer = await awaitable
        except (RedisConnectionError, RedisTimeoutError, ReadOnlyError, OSError) as error:
            self._lost(error)
            raise RedisAway(f"Redis at {self.url} is away: {error}") from error
        except RuntimeError as error:
            # What uvloop raises on a write to a connection that the peer just closed.
            if "handler is closed" not in str(error):
                raise
            self._lost(error)
            raise RedisAway(f"Redis at {self.url} is away: {error}") from error
        except ResponseError as error:
            if not str(error).startswith(
                ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "MISCONF", "OOM")
            ):
                raise
            self._lost(error)
            raise RedisAway(f"Redis at {self.url} takes no commands: {error}") from error
        if task.cancelling() > cancels:
            # The library writes inside asyncio.wait_for, which on Python 3.11 drops a cancel that arrives when the
            # write has just ended. Whoever cancelled us waits for it.
            raise asyncio.CancelledError
        if not self.is_connected:
            self.is_connected = True
            log.info("connected to Redis at %s", self.url)
        return answer

    def _lost(self, error: Exception) -> None:
        if self.is_connected or self.break_total == 0:
            log.warning("Redis at %s is away: %s", self.url, error)
            self.break_total += 1
        self.is_connected = False
