"""The process's connections to Redis, opened on first use and again after they break.

No command is retried implicitly. All failures of Redis become one error, RedisUnavailable, so that no Redis can end a
process. Commands stay within Redis 6.2. Keys of a mesh start with its name: `key("kvmesh", "proc", "decode-0")`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)

from kvmesh.config import ConfigError
from kvmesh.redis_cluster import cluster_client, is_cluster
from kvmesh.redis_dedicated import DedicatedRedis
from kvmesh.redis_dedicated_link import DedicatedLink
from kvmesh.redis_script import Call, Script
from kvmesh.redis_sentinel import sentinel_client, shown
from kvmesh.redis_sentinel_url import FORM, Address, is_sentinel, sentinel_fault
from kvmesh.redis_url import PASSWORD_REFUSED, without_password

log = logging.getLogger(__name__)

TIMEOUT_S = 1.0
"""A Redis that does not answer a command within this time is unavailable. Blocking reads wait for less."""

CONNECTIONS_MAX: Final = 16
"""Connection limit of a process. A command waits for a connection as long as for its answer.

Without a limit, each command during a stall of Redis would open another connection, and these would stay.
"""

FAILOVER: Final = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "READONLY", "UNBLOCKED")
"""Answers of a Redis that starts or fails over. The new master may have lost data."""

REFUSAL: Final = ("OOM", "NOREPLICAS", "NOPERM", "MISCONF", "BUSY", "EXECABORT")
"""Answers of a reachable Redis that refuses this command now."""

CORRUPT: Final = ("WRONGTYPE", "data string too short", "hash value is not an integer")
"""Parts of answers that show corrupt keys: another program has written them."""

Command = Sequence[str | bytes | int | float]
Answer = TypeVar("Answer")


class RedisUnavailable(Exception):
    """Redis is unreachable or refused a command. The caller continues with its last data, and tries again later."""

    def __init__(self, message: str, *, is_transient: bool = True, is_corrupt: bool = False) -> None:
        super().__init__(message)
        self.is_transient = is_transient
        """False if Redis calls the command wrong. It will refuse the command again."""
        self.is_corrupt = is_corrupt
        """True if the command or script cannot read its keys. It will fail again until the keys are removed."""


def key(mesh: str, *parts: str) -> str:
    """Return the Redis key of `mesh` named by `parts`."""
    return ":".join((mesh, *parts))


class RedisLink:
    """Connections to one Redis, shared by all tasks of the process. `close` it before the loop ends.

    On a Cluster (see redis_cluster) each command and each script has keys of one hash tag, and there is no atomic pipeline.
    With sentinels (see redis_sentinel) the connections follow the master.

    Every method raises RedisUnavailable if Redis is unreachable or answers with an error. Nothing is retried, so the caller
    knows which commands failed.
    """

    def __init__(self, url: str) -> None:
        self.shown = without_password(url)
        """The URL without its password, for logs and messages."""
        self.is_connected = False
        """True if the last command was answered, even with a refusal, but not with an answer of FAILOVER."""
        self.break_total = 0
        """Outages: the connection was lost, or a failover may have happened."""
        self._outage_kind = ""
        """Kind of the current outage. Each kind is logged once."""
        self._refused: dict[str, str] = {}
        """Last reason for the refusal of a command, by its name. Each reason is logged once."""
        self._connects = 0
        """How many times `is_connected` became True."""
        self._is_cluster = is_cluster(url)
        self._has_sentinels = is_sentinel(url)
        if self._has_sentinels and (fault := sentinel_fault(url)):
            raise ConfigError(f"The URL of Redis, {self.shown}, {fault}")
        try:
            self._client = self._opened(url)
            self._dedicated = None if self._is_cluster else DedicatedRedis(self._client)
            """For scripts and pipelines. None on a Cluster, where the library finds the node of each key."""
        except (ValueError, TypeError, KeyError, AttributeError, RedisError, RedisClusterException):
            # The library's own sentence may quote a part of the password.
            raise ConfigError(
                f"The URL of Redis, {self.shown}, cannot be used. Allowed is redis://[[user]:password@]host[:port][/db], "
                "or rediss:// for TLS, with special characters of the password as %XX. Also redis+cluster:// and "
                "rediss+cluster:// without /db, with one or more host:port between commas, and "
                f"{FORM}, or rediss+sentinel://."
            ) from None

    def _opened(self, url: str) -> Any:
        """Return the client of `url`. It connects when it is used."""
        bounds: dict[str, Any] = {"timeout_s": TIMEOUT_S, "connections_max": CONNECTIONS_MAX}
        if self._is_cluster:
            return cluster_client(url, **bounds)
        if not self._has_sentinels:
            return _client(url)
        return sentinel_client(url, on_master=self._on_master, **bounds)

    async def execute(self, *command: str | bytes | int | float) -> Any:
        """Run one command and return its answer."""
        return await self._guarded(
            self._client.execute_command(*command),
            str(command[0]),
        )

    async def pipeline(self, commands: Sequence[Command], *, atomic: bool = False) -> list[Any]:
        """Run `commands` in one round trip (`atomic`: as one MULTI) and return their answers in order.

        After a failure, some of the commands may have run. Answers are bytes, ints, lists and None, as Redis sent them,
        or what the client library makes of them.
        """
        names = "+".join(sorted({str(command[0]) for command in commands}))
        if not atomic and (dedicated := self._free_dedicated()) is not None:
            return await self._guarded(_unrefused(dedicated.exchange(commands)), names)
        pipe = self._client.pipeline(transaction=atomic)
        for command in commands:
            pipe.execute_command(*command)
        return list(await self._guarded(pipe.execute(), names))

    async def scripts(self, script: Script, calls: Sequence[Call]) -> list[Any]:
        """Run `script` once per call, in order, in one round trip, and return the answers.

        If Redis lacks the script, a second round trip sends its text. After a failure or a refusal, some of the calls may
        have run.
        """
        answers = await self._scripts("EVALSHA", script.digest, calls)
        missing = [i for i, each in enumerate(answers) if isinstance(each, NoScriptError)]
        if missing:
            again = await self._scripts("EVAL", script.text, [calls[i] for i in missing])
            for i, each in zip(missing, again, strict=True):
                answers[i] = each
        for each in answers:
            if isinstance(each, Exception):
                raise self._error_of(each, "EVALSHA") from each
        return answers

    async def _scripts(self, command: str, name: str, calls: Sequence[Call]) -> list[Any]:
        dedicated = self._free_dedicated()
        if dedicated is not None:
            words = [(command, name, len(keys), *keys, *arguments) for keys, arguments in calls]
            return await self._guarded(dedicated.exchange(words), "EVALSHA")
        pipe = self._client.pipeline(transaction=False)
        for keys, arguments in calls:
            pipe.execute_command(command, name, len(keys), *keys, *arguments)
        return list(await self._guarded(pipe.execute(raise_on_error=False), "EVALSHA"))

    def _free_dedicated(self) -> DedicatedRedis | None:
        """Return the dedicated connection unless it is busy, or there is none."""
        return None if self._dedicated is None or self._dedicated.is_busy else self._dedicated

    def subscription(self) -> Any:
        """Return a new redis.asyncio PubSub. The caller must await its `aclose`, and wrap its calls in `guarded`."""
        return self._client.pubsub(ignore_subscribe_messages=True)

    def dedicated(self) -> DedicatedLink:
        """Return a new connection for one task. The caller must `close` it. It is not one of CONNECTIONS_MAX."""
        own = None if self._is_cluster else DedicatedRedis(self._client)
        return DedicatedLink(own, self._guarded, self.execute)

    async def guarded(self, awaitable: Awaitable[Answer]) -> Answer:
        """Await a call of the client library. Its errors become RedisUnavailable."""
        return await self._guarded(awaitable, "subscription")

    async def close(self) -> None:
        """Close all connections."""
        if self._dedicated is not None:
            self._dedicated.close()
        await self._client.aclose()

    async def _guarded(self, awaitable: Awaitable[Answer], command: str) -> Answer:
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        connects = self._connects if self._has_sentinels else None
        unavailable: RedisUnavailable
        try:
            answer = await awaitable
        except (RedisError, RedisClusterException, OSError) as error:
            unavailable = self._error_of(error, command, connects)
            unavailable.__cause__ = error
        except RuntimeError as error:
            # uvloop raises this at a write to a connection that the peer has just closed.
            if "handler is closed" not in str(error) and task.cancelling() == cancels:
                raise
            unavailable = self._on_outage(str(error), connects=connects)
            unavailable.__cause__ = error
        else:
            if task.cancelling() == cancels:
                if answer is not None:  # None: a subscription without a message in its time
                    self._answered(command)
                return answer
            # The library writes inside asyncio.wait_for. On Python 3.11, wait_for drops a cancellation that arrives just
            # after the write. The canceller waits for this task, so the cancellation is raised here.
            raise asyncio.CancelledError
        if task.cancelling() > cancels:
            raise asyncio.CancelledError from unavailable  # the same after a failed write
        if self._is_cluster and not self.is_connected:
            with suppress(RedisError, OSError):
                await self._client.aclose()  # so that the next command reads the layout of the nodes again
        raise unavailable

    def _answered(self, command: str) -> None:
        self._connected()
        if self._refused.pop(command, None) is not None:
            log.info("Redis at %s accepts %s again", self.shown, command)

    def _connected(self) -> None:
        if not self.is_connected:
            self.is_connected = True
            self._connects += 1
            log.info("connected to Redis at %s", self.shown)

    def _on_master(self, address: Address, before: Address | None) -> None:
        log.info("the master of Redis at %s is %s", self.shown, shown(address))
        if before is not None and self.is_connected:  # otherwise the outage is counted already
            self._on_outage(f"the master was {shown(before)}", "fails over")

    def _error_of(self, error: Exception, command: str, connects: int | None = None) -> RedisUnavailable:
        reason = _reason(error)
        # The client of a Cluster wraps the refusal of the last node.
        if isinstance(error, AuthenticationError) or isinstance(error.__cause__, AuthenticationError):
            return self._on_outage(reason, PASSWORD_REFUSED, connects)
        if not isinstance(error, ResponseError) or reason.startswith(FAILOVER):
            return self._on_outage(reason, connects=connects)
        self._connected()
        is_transient = reason.startswith(REFUSAL)
        if self._refused.get(command) != reason:
            self._refused[command] = reason
            level = logging.WARNING if is_transient else logging.ERROR
            log.log(level, "Redis at %s refuses %s: %s", self.shown, command, reason)
        is_corrupt = any(words in reason for words in CORRUPT)
        message = f"Redis at {self.shown} refuses {command}: {reason}"
        return RedisUnavailable(message, is_transient=is_transient, is_corrupt=is_corrupt)

    def _on_outage(
        self, reason: str, what: str = "is unavailable", connects: int | None = None
    ) -> RedisUnavailable:
        """Count and log an outage. `connects`: with sentinels, the number of connects when the failed command began.

        With sentinels a command that began before the last connect failed for an outage that is over, and counted.
        """
        unavailable = RedisUnavailable(f"Redis at {self.shown} {what}: {reason}")
        if connects is not None and connects != self._connects:
            return unavailable
        if self.is_connected or self.break_total == 0:
            self.break_total += 1
            self._outage_kind = ""
        if what != self._outage_kind:
            self._outage_kind = what
            log.warning("Redis at %s %s: %s", self.shown, what, reason)
        self.is_connected = False
        return unavailable


async def _unrefused(exchange: Awaitable[list[Any]]) -> list[Any]:
    """Return the answers of `exchange`. Raises the first refusal among them."""
    answers = await exchange
    for each in answers:
        if isinstance(each, Exception):
            raise each
    return answers


def _client(url: str) -> redis.asyncio.Redis:
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url,
        max_connections=CONNECTIONS_MAX,
        timeout=TIMEOUT_S,
        decode_responses=False,
        protocol=2,
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
    )
    return redis.asyncio.Redis.from_pool(pool)


_TYPED: Final = (
    (BusyLoadingError, "LOADING"),
    (MasterDownError, "MASTERDOWN"),
    (ClusterDownError, "CLUSTERDOWN"),
    (TryAgainError, "TRYAGAIN"),
    (ReadOnlyError, "READONLY"),
    (OutOfMemoryError, "OOM"),
    (NoPermissionError, "NOPERM"),
)
"""Errors without their first word: the library removes it from the text."""


def _reason(error: Exception) -> str:
    """Return the answer of Redis with its code first. In a pipeline the library prefixes the command; it is removed."""
    text = str(error)
    _, cause, rest = text.rpartition(_PIPELINE)
    if cause:
        text = rest.strip("()'\",")
    for kind, code in _TYPED:
        if isinstance(error, kind) and not text.startswith(code):
            return f"{code} {text}"
    found = _SCRIPT.search(text)
    return found.group(1) if found else text


_PIPELINE: Final = "of pipeline caused error: "
_SCRIPT: Final = re.compile(r".*@user_script: ?\d*: ?-?(.*)$", re.DOTALL)
"""The text in which Redis 6.2 wraps the error of a command inside a script."""
