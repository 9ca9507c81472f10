"""Client of a Redis that fails over by Redis Sentinel. The URL is in redis_sentinel_url.

Each new connection asks the sentinels for the master, and checks that the Redis there is one. So a connection is either to
the master or it fails, and the next one asks again. While connections are used, the sentinels are asked once a second: in
a planned failover, the former master serves on for some ten seconds. Once another master is found, all connections to the
former one are closed: a frozen or cut-off master would not close them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
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

log = logging.getLogger(__name__)

MASTER_CHECK: Final = ("HELLO", "2")
"""Command whose answer tells the role of a Redis. ROLE and INFO need rights of an administrator."""

LOOK_S: Final = 1.0
"""Interval of the questions for the master. The new master has leases for 2 s that were renewed at the former one."""

LEFT_S: Final = 30.0
"""For this time, a former master is the master again only if all sentinels that answer name it."""

LEFT_MAX: Final = 8
"""Former masters that are remembered."""

ALL_S: Final = 1.0
"""All sentinels are asked together for at most this time."""

REUSE_S: Final = 0.1
"""Commands use the last answer of the sentinels, or their failure, for this time."""

_DEMOTED: Final = "READONLY"

OnMaster = Callable[[Address, Address | None], None]
"""Takes the address of the master and the one before; None: there was none."""


class SentinelsRefuse(AuthenticationError):
    """A sentinel refuses the password, and no other one names the master."""


@dataclass(frozen=True, slots=True)
class Told:
    """Answer of the sentinels."""

    address: Address
    """Address of the master."""
    sentinel: Address
    """The sentinel that told it."""
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
        self._all = url.sentinels
        self._order = list(url.sentinels)
        self._turns = 0
        self._service = url.service
        self._connection_class = connection_class
        self._options = options
        self._timeout_s = timeout_s
        self._tls: Any = None
        """TLS settings with the loaded certificates; None: without TLS, and after a fault, so that they are read again."""

    async def first(self) -> tuple[Address, Address]:
        """Return the first sentinel that names the master, and the master. Raises redis.ConnectionError.

        It is a SentinelsRefuse if one of the sentinels refuses the password and no other answers.
        """
        found = await self._first_of(tuple(self._order))
        self.prefer(found[0])
        return found

    async def next_in_turn(self) -> tuple[Address, Address]:
        """Do the same, beginning with another sentinel at each call."""
        start = self._turns % len(self._all)
        self._turns += 1
        return await self._first_of(self._all[start:] + self._all[:start])

    async def all(self) -> dict[Address, Address]:
        """Ask all sentinels at once, and return the masters that they name within ALL_S."""
        masters = await asyncio.gather(*(self._named(each) for each in self._all))
        pairs = zip(self._all, masters, strict=True)
        return {sentinel: master for sentinel, master in pairs if master is not None}

    def prefer(self, sentinel: Address) -> None:
        """Ask `sentinel` first from now on."""
        self._order.remove(sentinel)
        self._order.insert(0, sentinel)

    def doubt(self, sentinel: Address) -> None:
        """Take note that no master was at the address that `sentinel` told. Another one is asked next."""
        if self._order[0] == sentinel:
            self._order.append(self._order.pop(0))

    async def _first_of(self, order: tuple[Address, ...]) -> tuple[Address, Address]:
        faults, unknown, is_refused = [], 0, False
        for sentinel in order:
            try:
                address = await self._ask(sentinel, self._timeout_s)
            except (RedisError, OSError) as error:
                is_refused = is_refused or isinstance(error, AuthenticationError)
                faults.append(f"{shown(sentinel)}: {error}")
                continue
            if address is not None:
                return sentinel, address
            unknown += 1
            faults.append(f'{shown(sentinel)} knows no master "{self._service}"')
        if unknown == len(faults):
            raise RedisConnectionError(f'the sentinels know no master named "{self._service}"')
        told = f'no sentinel names the master "{self._service}" ({"; ".join(faults)})'
        raise (SentinelsRefuse if is_refused else RedisConnectionError)(told)

    async def _named(self, sentinel: Address) -> Address | None:
        with suppress(RedisError, OSError):
            return await self._ask(sentinel, min(ALL_S, self._timeout_s))
        return None

    async def _ask(self, sentinel: Address, limit_s: float) -> Address | None:
        """Return the master's address, or None if this sentinel does not know it."""
        host, port = sentinel
        connection = self._connection_class(host=host, port=port, **self._options)
        if self._tls is not None:
            connection.ssl_context = self._tls
        self._tls = None
        try:
            async with asyncio.timeout(limit_s):
                await connection.connect()
                await connection.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
                answer = await connection.read_response()
        except TimeoutError:
            raise RedisConnectionError(f"no answer within {limit_s:g} s") from None
        except RuntimeError as error:  # as in MasterPool
            raise RedisConnectionError(str(error)) from None
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
        host.encode("idna")  # UnicodeError: empty or long labels, which the connection would raise
        if host and host.isprintable() and 1 <= int(port) <= PORT_MAX:
            return host, int(port)
    except (TypeError, ValueError):
        pass
    raise RedisConnectionError("the answer is no address")


def master_among(
    named: Mapping[Address, Address], current: Address | None, left_ago_s: Mapping[Address, float]
) -> Address | None:
    """Return the master of the masters that the sentinels of `named` name, or None if no one can be told.

    `current` is the master so far. `left_ago_s` is, by address, how long ago a former master was left.
    """
    votes = Counter(named.values())
    address, count = votes.most_common(1)[0]
    is_late = left_ago_s.get(address, math.inf) >= LEFT_S
    if len(votes) == 1 or (is_late and 2 * count > len(named)):
        return address
    if current in votes:
        return current
    return next((each for each in votes if each not in left_ago_s), None)


class _Question:
    """A question to the sentinels, shared by all who ask meanwhile, and for REUSE_S after its answer."""

    def __init__(self, changes: int) -> None:
        self.changes = changes
        self.until_s = math.inf
        """When it is too old, as a time of the loop."""
        self.task: asyncio.Task[Told | RedisError]

    async def run(self, ask: Callable[[int], Awaitable[Told]]) -> Told | RedisError:
        """Return the answer, or why there is none."""
        try:
            return await ask(self.changes)
        except RedisError as error:
            return error
        except asyncio.CancelledError:  # of the pool, not of those who wait
            return RedisConnectionError("closed")
        finally:
            self.until_s = asyncio.get_running_loop().time() + REUSE_S


class MasterPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to the master. A command waits for a free one, as with BlockingConnectionPool."""

    def __init__(self, service: str, sentinels: Sentinels, on_master: OnMaster, **options: Any) -> None:
        super().__init__(service, sentinels, **options)  # type: ignore[no-untyped-call]  # the library left it out
        self._on_master = on_master
        self._changes = 0
        self._next_look_s = 0.0
        self._look: asyncio.Task[None] | None = None
        self._question: _Question | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._left_s: dict[Address, float] = {}
        """When each former master was left, the last one at the end."""
        self._is_disagreement_logged = False

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
            self._keep(self._look)

    async def _follow(self) -> None:
        # RuntimeError: uvloop raises it at a write to a connection that the peer has just closed.
        with suppress(RedisError, OSError, RuntimeError):
            changes = self._changes
            sentinel, address = await self.sentinel_manager.next_in_turn()
            told = await self._settled(sentinel, address, changes)
            if told.address != self.master_address:
                connection: Any = self.make_connection()  # type: ignore[no-untyped-call]
                try:
                    await connection.connect_to(told)
                finally:
                    await connection.disconnect(nowait=True)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """See ConnectionPool."""
        self._question = None
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await super().aclose()

    async def get_master_address(self) -> Told:
        """Ask the sentinels, or share the question of another one. The address counts once `take` gets it."""
        question = self._question
        now_s = asyncio.get_running_loop().time()
        if question is None or question.changes != self._changes or now_s >= question.until_s:
            question = self._question = _Question(self._changes)
            question.task = asyncio.create_task(question.run(self._asked), name="redis-sentinel-question")
            self._keep(question.task)
        told = await asyncio.shield(question.task)
        if isinstance(told, RedisError):
            raise type(told)(*told.args)
        return told

    async def _asked(self, changes: int) -> Told:
        sentinel, address = await self.sentinel_manager.first()
        return await self._settled(sentinel, address, changes)

    async def _settled(self, sentinel: Address, address: Address, changes: int) -> Told:
        """Return what `sentinel` told. If that is a former master, ask the others, too."""
        if address == self.master_address or address not in self._left_s:
            return Told(address, sentinel, changes)
        named: dict[Address, Address] = {sentinel: address, **await self.sentinel_manager.all()}
        self._log_disagreement(named)
        now_s = asyncio.get_running_loop().time()
        left_ago_s = {each: now_s - left_s for each, left_s in self._left_s.items()}
        master = master_among(named, self.master_address, left_ago_s)
        if master is None:
            raise RedisConnectionError(f"the sentinels disagree: {_shown_names(named)}")
        sentinel = next(each for each, other in named.items() if other == master)
        self.sentinel_manager.prefer(sentinel)
        return Told(master, sentinel, changes)

    def _log_disagreement(self, named: Mapping[Address, Address]) -> None:
        is_disagreement = len(set(named.values())) > 1
        if is_disagreement and not self._is_disagreement_logged:
            log.warning('the sentinels of "%s" disagree: %s', self.service_name, _shown_names(named))
        self._is_disagreement_logged = is_disagreement

    def doubt(self, told: Told) -> None:
        """See Sentinels."""
        self.sentinel_manager.doubt(told.sentinel)

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
        self._note_left(before, address)
        self._on_master(address, before)
        connections: tuple[Any, ...] = (*self._available_connections, *self._in_use_connections)
        for each in connections:
            if each.is_connected and self._is_stale(each):
                await each.disconnect(nowait=True)

    def _note_left(self, before: Address | None, address: Address) -> None:
        self._left_s.pop(address, None)
        if before is not None:
            self._left_s[before] = asyncio.get_running_loop().time()
        while len(self._left_s) > LEFT_MAX:
            del self._left_s[next(iter(self._left_s))]

    def _is_stale(self, connection: Any) -> bool:
        return (connection.host, connection.port) != self.master_address


class _MasterConnection(SentinelManagedConnection):
    async def connect_to(self, told: Told) -> None:
        try:
            await super().connect_to(told.address)  # type: ignore[no-untyped-call]
        except RedisError:
            self.connection_pool.doubt(told)
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


def _shown_names(named: Mapping[Address, Address]) -> str:
    return ", ".join(f"{shown(sentinel)} names {shown(master)}" for sentinel, master in named.items())
