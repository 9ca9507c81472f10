"""Client of a Redis that fails over by Redis Sentinel. The URL is in redis_sentinel_url.

Each new connection asks the sentinels for the master, and checks that the Redis there is one. So a connection is either to
the master or it fails, and the next one asks again. While connections are used, the sentinels are asked once a second: in
a planned failover, the former master serves on for some ten seconds. Once another master is found, all connections to the
former one are closed: a frozen or cut-off master would not close them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import Connection, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from kvmesh.redis_sentinel_url import PORT_MAX, Address, SentinelUrl, sentinel_url

MASTER_CHECK: Final = ("HELLO", "2")
"""Command whose answer tells the role of a Redis. ROLE and INFO need rights of an administrator."""

LOOK_S: Final = 1.0
"""Interval of the questions for the master. The new master has leases for 2 s that were renewed at the former one."""

_DEMOTED: Final = "READONLY"

OnMaster = Callable[[Address, Address | None], None]
"""Takes the address of the master and the one before; None: there was none."""


@dataclass(frozen=True, slots=True)
class Told:
    """What the sentinels told."""

    address: Address
    """Address of the master."""
    changes: int
    """Changes of the master that were known when they were asked."""


class Sentinels:
    """The sentinels of a URL. The one that answered last is asked first."""

    def __init__(
        self,
        url: SentinelUrl,
        connection_class: Callable[..., Any],
        options: dict[str, Any],
        timeout_s: float,
    ) -> None:
        """`connection_class` and `options` open a connection to a sentinel. Each is asked for at most `timeout_s`."""
        self._order = list(url.sentinels)
        self._service = url.service
        self._connection_class = connection_class
        self._options = options
        self._timeout_s = timeout_s
        self._tls: Any = None
        """TLS settings with the loaded certificates; None: without TLS, and after a fault, so that they are read again."""

    async def discover_master(self, service_name: str) -> Address:
        """Ask one sentinel after the other for the master's address. Raises redis.ConnectionError.

        It is an AuthenticationError if one of the sentinels refuses the password and no other answers.
        """
        faults, unknown, is_refused = [], 0, False
        for sentinel in tuple(self._order):
            try:
                address = await self._ask(sentinel)
            except (RedisError, OSError) as error:
                is_refused = is_refused or isinstance(error, AuthenticationError)
                faults.append(f"{shown(sentinel)}: {error}")
                continue
            if address is not None:
                self._order.remove(sentinel)
                self._order.insert(0, sentinel)
                return address
            unknown += 1
            faults.append(f'{shown(sentinel)} knows no master "{service_name}"')
        if unknown == len(faults):
            raise RedisConnectionError(f'the sentinels know no master named "{service_name}"')
        told = f'no sentinel names the master "{service_name}" ({"; ".join(faults)})'
        raise (AuthenticationError if is_refused else RedisConnectionError)(told)

    def doubt(self) -> None:
        """Take note that no master was at the address that was told. Another sentinel is asked next."""
        self._order.append(self._order.pop(0))

    async def _ask(self, sentinel: Address) -> Address | None:
        """Return the master's address, or None if this sentinel does not know it."""
        host, port = sentinel
        connection = self._connection_class(host=host, port=port, **self._options)
        if self._tls is not None:
            connection.ssl_context = self._tls
        self._tls = None
        try:
            async with asyncio.timeout(self._timeout_s):
                await connection.connect()
                await connection.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
                answer = await connection.read_response()
        except TimeoutError:
            raise RedisConnectionError(f"no answer within {self._timeout_s:g} s") from None
        finally:
            await connection.disconnect(nowait=True)
        self._tls = getattr(connection, "ssl_context", None)
        return _address_in(answer)


def _address_in(answer: Any) -> Address | None:
    """Return the address in the answer of a sentinel. Raises redis.ConnectionError if it cannot be read."""
    if answer is None:
        return None
    try:
        host, port = (bytes.decode(each) for each in answer)
        if host and 1 <= int(port) <= PORT_MAX:
            return host, int(port)
    except (TypeError, ValueError):
        pass
    raise RedisConnectionError("the answer is no address")


class MasterPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to the master. A command waits for a free one, as with BlockingConnectionPool."""

    def __init__(self, service: str, sentinels: Sentinels, on_master: OnMaster, **options: Any) -> None:
        super().__init__(service, sentinels, **options)  # type: ignore[no-untyped-call]  # the library left it out
        self._on_master = on_master
        self._changes = 0
        self._next_look_s = 0.0
        self._look: asyncio.Task[None] | None = None

    async def get_connection(self, *arguments: Any, **options: Any) -> Any:
        """See BlockingConnectionPool."""
        self.watch()
        return await super().get_connection(*arguments, **options)  # type: ignore[no-untyped-call]

    async def release(self, connection: Any) -> None:
        """See BlockingConnectionPool. A connection to a former master is closed: the library may have reopened it."""
        if connection.is_connected and self._is_stale(connection):
            await connection.disconnect(nowait=True)
        await super().release(connection)

    def watch(self) -> None:
        """Ask the sentinels in a task of the pool, if the last time is LOOK_S ago. Call it at each use of a connection."""
        now_s = asyncio.get_running_loop().time()
        is_looking = self._look is not None and not self._look.done()
        if self.master_address is not None and now_s >= self._next_look_s and not is_looking:
            self._next_look_s = now_s + LOOK_S
            self._look = asyncio.create_task(self._follow(), name="redis-sentinel")

    async def _follow(self) -> None:
        # RuntimeError: uvloop raises it at a write to a connection that the peer has just closed.
        with suppress(RedisError, OSError, RuntimeError):
            told = await self.get_master_address()
            if told.address != self.master_address:
                connection: Any = self.make_connection()  # type: ignore[no-untyped-call]
                try:
                    await connection.connect_to(told)
                finally:
                    await connection.disconnect(nowait=True)

    async def aclose(self) -> None:
        """See ConnectionPool."""
        if self._look is not None:
            self._look.cancel()
            await asyncio.wait([self._look])
        await super().aclose()

    async def get_master_address(self) -> Told:
        """Ask the sentinels. The address counts once `take` gets it."""
        changes = self._changes
        return Told(await self.sentinel_manager.discover_master(self.service_name), changes)

    def doubt(self) -> None:
        """See Sentinels."""
        self.sentinel_manager.doubt()

    async def take(self, told: Told) -> None:
        """Take note that a master is at the address. Connections to another one are closed, also those in use.

        Raises redis.ConnectionError if the master changed after the sentinels were asked: this one may be a former one.
        """
        address = told.address
        if address == self.master_address:
            return
        if told.changes != self._changes:
            raise RedisConnectionError(f"the master changed while {shown(address)} was connected")
        before, self.master_address = self.master_address, address
        self._changes += 1
        self._on_master(address, before)
        connections: tuple[Any, ...] = (*self._available_connections, *self._in_use_connections)
        for each in connections:
            if each.is_connected and self._is_stale(each):
                await each.disconnect(nowait=True)

    def _is_stale(self, connection: Any) -> bool:
        return (connection.host, connection.port) != self.master_address


class _MasterConnection(SentinelManagedConnection):
    async def connect_to(self, told: Told) -> None:
        try:
            await super().connect_to(told.address)  # type: ignore[no-untyped-call]
        except RedisError:
            self.connection_pool.doubt()
            raise
        try:
            await self.connection_pool.take(told)
        except RedisError:
            await self.disconnect(nowait=True)
            raise

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        await super().on_connect_check_health(check_health)
        await self.send_command(*MASTER_CHECK, check_health=False)
        refuse_replica(await self.read_response(), (self.host, self.port))

    async def read_response(self, *arguments: Any, **options: Any) -> Any:
        try:
            return await Connection.read_response(self, *arguments, **options)
        except ResponseError as error:
            # Redis 6.2 wraps the answer in that of a script, and the library does not recognise it.
            if not isinstance(error, ReadOnlyError) and _DEMOTED not in str(error):
                raise
            await self.disconnect(nowait=True)
            raise RedisConnectionError(
                f"{_DEMOTED} {shown((self.host, self.port))} is not the master"
            ) from None


class _MasterTlsConnection(_MasterConnection, SentinelManagedSSLConnection):
    pass


def sentinel_client(
    url: str, *, timeout_s: float, connections_max: int, on_master: OnMaster = lambda *_: None
) -> Redis:
    """Return a client of the master of `url` that retries nothing. Raises ValueError with the fault as a verb phrase.

    `on_master` is called when the master is found, and each time it is found at another address.
    """
    parts = sentinel_url(url)
    bounds = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
    }
    options: dict[str, Any] = {"max_connections": connections_max, "timeout": timeout_s, **bounds}
    options |= parse_url(parts.redis)
    for name in ("host", "port"):
        del options[name]
    is_tls = options.pop("connection_class", None) is SSLConnection
    to_sentinel = bounds | {
        name: value for name, value in options.items() if name.startswith(("ssl_", "socket_"))
    }
    if parts.username or parts.password:
        to_sentinel |= {"username": parts.username or None, "password": parts.password}
    sentinels = Sentinels(
        parts,
        SSLConnection if is_tls else Connection,
        to_sentinel | {"protocol": 2, "driver_info": None},
        options["socket_timeout"],
    )
    options |= {"protocol": 2, "decode_responses": False}
    connection_class = _MasterTlsConnection if is_tls else _MasterConnection
    pool = MasterPool(parts.service, sentinels, on_master, connection_class=connection_class, **options)
    return Redis.from_pool(pool)


def refuse_replica(answer: Any, address: Address) -> None:
    """Raise redis.ConnectionError unless `answer`, of MASTER_CHECK, is that of a master."""
    pairs = zip(answer[::2], answer[1::2], strict=False) if isinstance(answer, list) else ()
    role = next((value for name, value in pairs if name == b"role"), None)
    if role != b"master":
        what = "replica" if role == b"replica" else "server without the role of a Redis"
        raise RedisConnectionError(f"the sentinels name {shown(address)}, which is a {what}")


def shown(address: Address) -> str:
    """Return "host:port" of `address`."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
