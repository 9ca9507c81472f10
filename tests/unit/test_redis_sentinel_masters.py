"""Which master is taken when sentinels and masters answer late or differ. No Redis does so on request; scripts do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
from redis.asyncio.connection import Connection
from redis.exceptions import ConnectionError as RedisConnectionError

from kvmesh.ports import free_ports
from kvmesh.redis_link import RedisLink, RedisUnavailable
from kvmesh.redis_sentinel import Sentinels, master_among
from kvmesh.redis_sentinel_url import Address, sentinel_url
from tests.patience import patience
from tests.unit.answering_server import answering_server

ROLE = b"*4\r\n$6\r\nserver\r\n$5\r\nredis\r\n$4\r\nrole\r\n$6\r\nmaster\r\n"


class Scripted:
    """A server that is a master, and a sentinel that names `master`."""

    def __init__(self, asked: Counter[str]) -> None:
        self.port = 0
        self.master = self
        self.opened = 0
        self.thawed = asyncio.Event()
        """Unset: no answer, but the connections stay open."""
        self.thawed.set()
        self._asked = asked
        """Commands and connections by port, of all servers."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection."""
        self.opened += 1
        while count := (await reader.readline())[1:]:
            words = []
            for _ in range(int(count)):
                size = int((await reader.readline())[1:])
                words.append((await reader.readexactly(size + 2))[:-2])
            self._asked[f"{words[0].decode()} {self.port}"] += 1
            await self.thawed.wait()
            writer.write(self._answer(words[0]))

    def _answer(self, command: bytes) -> bytes:
        if command == b"SENTINEL":
            port = str(self.master.port).encode()
            return b"*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%s\r\n" % (len(port), port)
        return ROLE if command == b"HELLO" else b"+OK\r\n"


class Scene:
    """Two masters, sentinels that name the first, and a link."""

    def __init__(self, servers: list[Scripted], asked: Counter[str]) -> None:
        self.one, self.two, *self.sentinels = servers
        self.asked = asked
        for sentinel in self.sentinels:
            sentinel.master = self.one
        addresses = ",".join(f"127.0.0.1:{each.port}" for each in self.sentinels)
        self.link = RedisLink(f"redis+sentinel://{addresses}/service")

    def count(self, command: str, server: Scripted) -> int:
        """Return how often `server` was asked."""
        return self.asked[f"{command} {server.port}"]

    async def write_until(self, server: Scripted) -> None:
        """Write until `server` gets a write."""
        before = self.count("SET", server)
        async with patience(5):
            while self.count("SET", server) == before:
                with suppress(RedisUnavailable):
                    await self.link.execute("SET", "key", "value")
                await asyncio.sleep(0.01)


@asynccontextmanager
async def scene(sentinels: int, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    """Run servers and a link that asks for the master at each use."""
    monkeypatch.setattr("kvmesh.redis_sentinel.LOOK_S", 0.0)
    asked: Counter[str] = Counter()
    async with AsyncExitStack() as stack:
        servers = [Scripted(asked) for _ in range(2 + sentinels)]
        for each in servers:
            each.port = await stack.enter_async_context(answering_server(each.serve))
        played = Scene(servers, asked)
        stack.push_async_callback(played.link.close)
        yield played


async def test_a_slow_connection_to_the_former_master_does_not_lead_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was begun before the change, and its role check ends after it."""
    async with scene(1, monkeypatch) as played:
        dedicated = played.link.dedicated()
        await played.write_until(played.one)
        asked = played.count("HELLO", played.one)
        played.one.thawed.clear()
        late = asyncio.create_task(dedicated.execute("SET", "lease", "old"))
        async with patience(5):
            while played.count("HELLO", played.one) == asked:
                await asyncio.sleep(0.01)
        played.sentinels[0].master = played.two
        await played.write_until(played.two)
        written = played.count("SET", played.one)
        played.one.thawed.set()
        with pytest.raises(RedisUnavailable, match="the master changed"):
            await late
        await dedicated.execute("SET", "lease", "new")
        await played.write_until(played.two)
        assert played.count("SET", played.one) == written
        assert played.link.break_total == 1
        dedicated.close()


async def test_a_sentinel_that_lags_does_not_lead_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first sentinel still names the former master, which still is a master. Once both name it, it is taken again."""
    async with scene(2, monkeypatch) as played:
        monkeypatch.setattr("kvmesh.redis_sentinel.REUSE_S", 0.0)
        lagging, informed = played.sentinels
        await played.write_until(played.one)
        informed.master = played.two
        await played.write_until(played.two)
        written, questions = played.count("SET", played.one), played.count("SENTINEL", lagging)
        while played.count("SENTINEL", lagging) < questions + 5:
            dedicated = played.link.dedicated()
            await dedicated.execute("SET", "lease", "new")
            dedicated.close()
        assert played.count("SET", played.one) == written
        assert played.link.break_total == 1
        warnings = [each.getMessage() for each in caplog.records if "disagree" in each.getMessage()]
        assert len(warnings) == 1
        assert f"127.0.0.1:{lagging.port} names 127.0.0.1:{played.one.port}" in warnings[0]
        informed.master = played.one
        await played.write_until(played.one)
        assert played.link.break_total == 2


A, B, C = (("a", 1), ("b", 1), ("c", 1))
S1, S2, S3 = (("s1", 1), ("s2", 1), ("s3", 1))


@pytest.mark.parametrize(
    ("named", "current", "left_ago_s", "master"),
    [
        ({S1: A, S2: A}, B, {A: 0.0}, A),
        ({S1: A}, B, {A: 0.0}, A),
        ({S1: A, S2: A, S3: B}, B, {A: 29.0}, B),
        ({S1: A, S2: A, S3: B}, B, {A: 31.0}, A),
        ({S1: A, S2: B}, B, {A: 31.0}, B),
        ({S1: A, S2: C}, B, {A: 1.0}, C),
        ({S1: A, S2: C}, B, {A: 1.0, C: 2.0}, None),
    ],
)
def test_the_master_among_those_that_the_sentinels_name(
    named: dict[Address, Address],
    current: Address,
    left_ago_s: dict[Address, float],
    master: Address | None,
) -> None:
    """A master that was just left is taken again if all name it; later if most do."""
    assert master_among(named, current, left_ago_s) == master


async def test_failing_commands_share_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run at once, and those that follow: Redis is down, and each would ask a sentinel."""
    async with scene(1, monkeypatch) as played:
        monkeypatch.setattr("kvmesh.redis_sentinel.REUSE_S", 60.0)
        (sentinel,) = played.sentinels
        (played.one.port,) = free_ports("127.0.0.1", 1)
        for _ in range(3):
            failing = [played.link.execute("GET", "key") for _ in range(10)]
            failing += [played.link.pipeline([("GET", "key")])]
            for each in await asyncio.gather(*failing, return_exceptions=True):
                assert isinstance(each, RedisUnavailable), each
        assert sentinel.opened == 1


async def test_a_question_that_is_given_up_goes_on_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first command asked, and is cancelled. A closed link fails the rest, and cancels nobody."""
    async with scene(1, monkeypatch) as played:
        (sentinel,) = played.sentinels
        sentinel.thawed.clear()
        first, second = (asyncio.create_task(played.link.execute("GET", "key")) for _ in range(2))
        async with patience(5):
            while not played.count("SENTINEL", sentinel):
                await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait([first])
        sentinel.thawed.set()
        assert await second == b"OK"
        assert sentinel.opened == 1
        sentinel.thawed.clear()
        late = played.link.dedicated()
        third = asyncio.create_task(late.execute("GET", "key"))
        async with patience(5):
            while sentinel.opened < 2:
                await asyncio.sleep(0.01)
        await played.link.close()
        assert isinstance((await asyncio.gather(third, return_exceptions=True))[0], RedisUnavailable)
        sentinel.thawed.set()


class Closing(Connection):
    """A connection that the peer has just closed, as uvloop reports it."""

    async def connect(self) -> None:
        """Fail."""
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")


async def test_a_sentinel_that_closes_at_once_is_one_that_does_not_answer() -> None:
    """By both questions."""
    sentinels = Sentinels(sentinel_url("redis+sentinel://a,b/service"), Closing, {}, 1.0)
    assert await sentinels.all() == {}
    with pytest.raises(RedisConnectionError, match=r"no sentinel names .*a:26379: .*; b:26379: "):
        await sentinels.first()
