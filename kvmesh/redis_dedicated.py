"""A dedicated connection to Redis, for frequent commands with a waiting caller.

A round trip takes 87 us of CPU through the client library, and 25 us here (docs/measurements/limits.md, an empty script).
Here commands are packed at once, and one future waits for all answers. The library still parses the URL for user, password,
database and TLS. The connection is opened on first use, and again after it breaks. Nothing is retried implicitly.

With sentinels, each opening asks them for the master. A connection to a former master is closed before the next exchange.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import hiredis
from redis.exceptions import AuthenticationError, NoScriptError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvmesh.redis_sentinel import MASTER_CHECK, MasterPool, refuse_replica
from kvmesh.redis_sentinel_url import Address

Words: TypeAlias = Sequence[str | bytes | int | float]


class DedicatedRedis:
    """A connection with the settings of `client`, a redis.asyncio.Redis. Its `socket_timeout` bounds each exchange.

    It carries one exchange at a time: check `is_busy` first.
    """

    def __init__(self, client: Any) -> None:
        self.is_busy = False
        pool = client.connection_pool
        self._template = pool.make_connection()
        self._masters: MasterPool | None = pool if isinstance(pool, MasterPool) else None
        self._replies: _Replies | None = None
        self._address: Address | None = None
        """Address of the master at the last opening, with sentinels."""

    async def exchange(self, commands: Iterable[Words]) -> list[Any]:
        """Send `commands` in one write and return their answers in order.

        The refusal of a command is a ResponseError among the answers. The refusal of the connection is a ConnectionError.

        Raises redis.RedisError or OSError unless all commands are answered. The connection is then closed, and also if the
        caller is cancelled. Otherwise a late answer would reach the next exchange.
        """
        assert not self.is_busy
        packed = [_packed(*command) for command in commands]
        if not packed:
            return []
        self.is_busy = True
        try:
            if self._masters is not None:
                self._masters.watch()
                if self._address != self._masters.master_address:
                    self.close()
            replies = self._replies
            if replies is None or not replies.is_open:
                replies = await self._open()
            answers = await replies.request(packed, self._template.socket_timeout)
            if replies.is_demoted and self._masters is not None:
                self.close()
            return answers
        finally:
            self.is_busy = False

    def close(self) -> None:
        """Close the connection. A waiting exchange fails."""
        if self._replies is not None:
            self._replies.close("closed")

    async def _open(self) -> _Replies:
        masters = self._masters
        if masters is None:
            self._replies = await self._connected(None)
            return self._replies
        told = await masters.get_master_address()
        try:
            replies = await self._connected(told.address)
        except (RedisError, OSError):
            masters.doubt(told)
            raise
        try:
            await masters.take(told)
        except BaseException:
            replies.close("given up")
            raise
        self._replies, self._address = replies, told.address
        return replies

    async def _connected(self, master: Address | None) -> _Replies:
        """Return a connection to `master`, or to the address of the URL."""
        loop, template = asyncio.get_running_loop(), self._template
        limit_s = template.socket_connect_timeout
        try:
            async with asyncio.timeout(limit_s):
                tls = template.ssl_context.get() if hasattr(template, "ssl_context") else None
                if hasattr(template, "path"):
                    _, replies = await loop.create_unix_connection(_Replies, template.path)
                else:
                    host, port = master or (template.host, template.port)
                    try:
                        _, replies = await loop.create_connection(_Replies, host, port, ssl=tls)
                    except ValueError as error:  # such as a label of more than 63 characters
                        raise RedisConnectionError(f"the host cannot be used: {error}") from None
                handshake = _handshake(template.username, template.password, template.db)
                if master is not None:
                    handshake.append(_packed(*MASTER_CHECK))
                answers = await replies.request(handshake, limit_s) if handshake else []
                try:
                    for answer in answers:
                        if isinstance(answer, RedisError):
                            is_login = isinstance(answer, AuthenticationError)
                            raise answer if is_login else RedisConnectionError(str(answer))
                    if master is not None:
                        refuse_replica(answers[-1], master)
                except RedisError:
                    replies.close("refused")
                    raise
        except TimeoutError:
            raise RedisTimeoutError(f"no connection within {limit_s:g} s") from None
        return replies


def _handshake(user: str | None, password: str | None, database: int | str | None) -> list[bytes]:
    """Return the first commands of a connection: AUTH and SELECT, where needed."""
    commands: list[tuple[str, ...]] = []
    if user or password:
        commands.append(("AUTH", *([user] if user else []), password or ""))
    if database and int(database):
        commands.append(("SELECT", str(database)))
    return [_packed(*command) for command in commands]


def _packed(*words: str | bytes | int | float) -> bytes:
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]  # its stubs lack tuples of any length
    return packed


_INCOMPLETE: Final = object()


class _Replies(asyncio.Protocol):
    """The answers of one connection."""

    def __init__(self) -> None:
        self.is_open = False
        self.is_demoted = False
        """True after an answer that this Redis takes no writes: it may be a former master."""
        self._reader = hiredis.Reader(replyError=self._error_of, notEnoughData=_INCOMPLETE)
        self._transport: Any = None
        self._awaited: asyncio.Future[list[Any]] | None = None
        self._count = 0
        self._answers: list[Any] = []

    async def request(self, packed: list[bytes], limit_s: float | None) -> list[Any]:
        """Send commands and return their answers."""
        loop = asyncio.get_running_loop()
        self._answers, self._count = [], len(packed)
        awaited = self._awaited = loop.create_future()
        timer = loop.call_later(limit_s, self.close, f"no answer within {limit_s:g} s") if limit_s else None
        try:
            self._transport.write(b"".join(packed))
            answers: list[Any] = await awaited
            return answers
        except BaseException:
            self.close("given up")
            raise
        finally:
            self._awaited = None
            if timer is not None:
                timer.cancel()

    def close(self, why: str) -> None:
        """Abort the connection. Data that still arrives is ignored."""
        self.is_open = False
        self._transport.abort()
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_exception(RedisConnectionError(why))

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol."""
        self._transport, self.is_open = transport, True

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self.close(str(exc or "Redis closed the connection"))

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if not self.is_open:
            return
        answers, reader = self._answers, self._reader
        try:
            reader.feed(data)
            while (answer := reader.gets()) is not _INCOMPLETE:
                answers.append(answer)
        except hiredis.ProtocolError as error:
            self.close(str(error))
            return
        if self._awaited is None or len(answers) > self._count:
            self.close("Redis sent an answer without a command")
        elif len(answers) == self._count and not self._awaited.done():
            self._awaited.set_result(answers)

    def _error_of(self, text: str) -> RedisError:
        self.is_demoted = self.is_demoted or "READONLY" in text
        return _error_of(text)


def _error_of(text: str) -> RedisError:
    if text.startswith(_LOGIN):
        return AuthenticationError(text)
    if text.startswith(_FULL):
        return RedisConnectionError(text)
    return (NoScriptError if text.startswith("NOSCRIPT") else ResponseError)(text)


_LOGIN: Final = ("NOAUTH", "WRONGPASS", "ERR AUTH")
_FULL: Final = "ERR max number of clients reached"
"""Answers that concern the connection, not a command."""
