"""Which master is taken when sentinels and masters answer late or differ. No Redis does so on request; scripts do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from kvmesh.redis_link import RedisLink, RedisUnavailable
from tests.patience import patience

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
        with suppress(OSError, asyncio.IncompleteReadError, ValueError):
            while True:
                words = []
                for _ in range(int((await reader.readline())[1:])):
                    size = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(size + 2))[:-2])
                self._asked[f"{words[0].decode()} {self.port}"] += 1
                await self.thawed.wait()
                writer.write(self._answer(words[0]))
        writer.close()

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
            server = await asyncio.start_server(each.serve, "127.0.0.1", 0)
            stack.push_async_callback(server.wait_closed)
            stack.callback(server.close)
            each.port = server.sockets[0].getsockname()[1]
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
