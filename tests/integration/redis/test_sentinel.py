"""A Redis that fails over by Redis Sentinel: every kind of connection follows the master, and no write goes elsewhere."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvmesh.cli.leased_names import leased_names
from kvmesh.cli.readiness import redis_fault
from kvmesh.config import ROOT
from kvmesh.redis_binary import redis_binaries
from kvmesh.redis_link import CONNECTIONS_MAX, RedisLink, RedisUnavailable
from kvmesh.redis_script import Script
from kvmesh.redis_sentinel import REUSE_S
from kvmesh.redis_url import PASSWORD_REFUSED, without_password
from tests.conftest import redis_kind
from tests.integration.redis.sentinels import NEVER_MS, SENTINEL_RIGHTS, SERVICE, SentinelSet, Server
from tests.patience import patience

WRITE = Script("return redis.call('INCR', KEYS[1])")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run on the first Redis of the machine, or on each."""
    if "binary" in metafunc.fixturenames:
        found = redis_binaries()
        is_all = metafunc.config.getoption("--every-redis") or metafunc.function in ON_EVERY_REDIS
        metafunc.parametrize("binary", found if is_all else found[:1], ids=redis_kind)


@pytest.fixture
async def servers(binary: Path, tmp_path: Path) -> AsyncIterator[SentinelSet]:
    """A master, its replica and three sentinels."""
    async with running(SentinelSet(binary, tmp_path)) as started:
        yield started


@pytest.fixture
async def calm(binary: Path, tmp_path: Path) -> AsyncIterator[SentinelSet]:
    """The same, with sentinels that never take the master for dead."""
    async with running(SentinelSet(binary, tmp_path, down_after_ms=NEVER_MS)) as started:
        yield started


@asynccontextmanager
async def running(servers: SentinelSet) -> AsyncIterator[SentinelSet]:
    """Start the servers, and end them in any case."""
    try:
        await servers.start()
        yield servers
    finally:
        servers.stop()


@asynccontextmanager
async def linked(url: str) -> AsyncIterator[RedisLink]:
    """Open a link, and close it."""
    link = RedisLink(url)
    try:
        yield link
    finally:
        await link.close()


class Ways:
    """All ways in which the mesh writes to Redis; each counts its writes in a key of its name."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._dedicated = link.dedicated()
        self.all: dict[str, Callable[[], Awaitable[Any]]] = {
            "execute": lambda: link.execute("INCR", "execute"),
            "pipeline": lambda: link.pipeline([("INCR", "pipeline"), ("PING",)]),
            "atomic": lambda: link.pipeline([("INCR", "atomic"), ("PING",)], atomic=True),
            "script": lambda: link.scripts(WRITE, [(("script",), ())]),
            "dedicated": lambda: self._dedicated.execute("INCR", "dedicated"),
        }

    async def once(self) -> None:
        """Write in every way. Raises RedisUnavailable."""
        for way in self.all.values():
            await way()

    async def until_once(self, bound_s: float = 20.0) -> None:
        """Write until every way has succeeded in turn."""
        async with patience(bound_s):
            while True:
                try:
                    return await self.once()
                except RedisUnavailable:
                    await asyncio.sleep(0.02)

    def close(self) -> None:
        self._dedicated.close()


class Listener:
    """Follows a channel as the mesh's watchers do: with a new subscription after each failure."""

    def __init__(self, link: RedisLink) -> None:
        self.heard: list[bytes] = []
        self.failures = 0
        self.subscriptions = 0
        self._link = link

    async def run(self) -> None:
        """Listen until cancelled."""
        while True:
            subscription = self._link.subscription()
            try:
                await self._link.guarded(subscription.subscribe("news"))
                self.subscriptions += 1
                while True:
                    message = await self._link.guarded(subscription.get_message(timeout=1.0))
                    if message:
                        self.heard.append(message["data"])
            except RedisUnavailable:
                self.failures += 1
                await asyncio.sleep(0.02)
            finally:
                with suppress(Exception):
                    await subscription.aclose()

    async def hears(self, link: RedisLink, word: str) -> None:
        """Publish `word` until it is heard."""
        async with patience(20):
            while word.encode() not in self.heard:
                with suppress(RedisUnavailable):
                    await link.execute("PUBLISH", "news", word)
                await asyncio.sleep(0.02)


@asynccontextmanager
async def listening(link: RedisLink) -> AsyncIterator[Listener]:
    """Run a listener in the block."""
    listener = Listener(link)
    task = asyncio.create_task(listener.run())
    try:
        yield listener
    finally:
        task.cancel()
        await asyncio.wait([task])


def masters_logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the masters' addresses of the log, in order."""
    texts = [record.getMessage() for record in caplog.records]
    return [text.rpartition(" is ")[2] for text in texts if text.startswith("the master of Redis at")]


async def count(server: Server, name: str) -> int:
    """Return a counter of `server`."""
    return int(await server.ask("GET", name) or 0)


async def test_after_the_death_of_the_master_all_ways_lead_to_the_new_one(
    servers: SentinelSet, caplog: pytest.LogCaptureFixture
) -> None:
    """Within seconds, as one outage, with one line about the new master. What returns at the old address gets no write."""
    caplog.set_level(logging.INFO, "kvmesh.redis_link")
    old, new = servers.data
    async with linked(servers.url) as link, listening(link) as listener:
        ways = Ways(link)
        await ways.once()
        await listener.hears(link, "before")
        assert await link.execute("WAIT", 1, 5000) == 1
        assert [await count(new, name) for name in ways.all] == [1] * len(ways.all)
        assert link.break_total == 0
        old.kill()
        await ways.until_once()
        await listener.hears(link, "after")
        await ways.once()
        assert link.break_total == 1
        assert masters_logged(caplog) == [old.address, new.address]
        old.start()  # it is a master, without data, until the sentinels demote it
        await old.reaches("PONG", "ECHO", "PONG")
        await asyncio.gather(*(way() for way in ways.all.values() for _ in range(2 * CONNECTIONS_MAX)))
        async with linked(servers.url) as fresh:
            await fresh.execute("INCR", "execute")
        assert await old.ask("DBSIZE") == 0
        before = [await count(new, name) for name in ways.all]
        await old.ask("REPLICAOF", *new.address.split(":"))
        await old.reaches("'master_link_status': 'up'", "INFO", "replication")
        await ways.once()
        assert [await count(new, name) for name in ways.all] == [each + 1 for each in before]
        assert link.break_total == 1
        ways.close()


async def test_a_frozen_master_is_left(servers: SentinelSet, caplog: pytest.LogCaptureFixture) -> None:
    """Its connections stay open, so nothing but the sentinels tells. A subscription goes on at the new master."""
    caplog.set_level(logging.INFO, "kvmesh.redis_link")
    old, new = servers.data
    async with linked(servers.url) as link, listening(link) as listener:
        ways = Ways(link)
        await ways.once()
        await asyncio.gather(*(link.execute("ECHO", "x") for _ in range(CONNECTIONS_MAX - 1)))
        await listener.hears(link, "before")
        old.signal(signal.SIGSTOP)
        try:
            await ways.until_once()
            async with patience(2):  # connections that were idle at the freeze are not tried one by one
                await asyncio.gather(*(link.execute("ECHO", "x") for _ in range(CONNECTIONS_MAX - 1)))
            await listener.hears(link, "during")
            assert link.break_total == 1
        finally:
            old.signal(signal.SIGCONT)
        await ways.once()
        assert masters_logged(caplog) == [old.address, new.address]
        assert link.break_total == 1
        ways.close()


async def test_a_planned_failover_counts_as_one_outage(servers: SentinelSet) -> None:
    """The former master serves on for ten seconds, and closes no connection. It is left within 2 s. A link without any
    error counts the outage, too: the new master may lack the last writes.
    """
    new = servers.data[1]
    async with linked(servers.url) as link, listening(link) as listener, linked(servers.url) as quiet:
        ways = Ways(link)
        await ways.once()
        await quiet.execute("INCR", "quiet")
        await listener.hears(link, "before")
        await servers.sentinels[0].ask("SENTINEL", "FAILOVER", SERVICE)
        await new.reaches("'role': 'master'", "INFO", "replication")
        async with patience(3):
            while await count(new, "execute") < 2 or await count(new, "quiet") < 2:
                await ways.until_once()
                await quiet.execute("INCR", "quiet")
                await asyncio.sleep(0.02)
        written = [await count(new, name) for name in ways.all]
        await ways.once()
        await listener.hears(link, "after")
        assert [await count(new, name) for name in ways.all] == [each + 1 for each in written]
        assert (link.break_total, quiet.break_total) == (1, 1)
        ways.close()


async def test_a_demoted_master_gets_no_second_write(calm: SentinelSet) -> None:
    """Each way is refused once, and its connection is closed. The sentinels still name this Redis: it is refused then."""
    master, replica = calm.data
    async with linked(calm.url) as link:
        ways = Ways(link)
        await ways.once()
        await master.ask("REPLICAOF", *replica.address.split(":"))
        for name in ("script", "dedicated", "atomic", "execute"):
            with pytest.raises(RedisUnavailable, match=r"READONLY|which is a replica"):
                await ways.all[name]()
        for way in ways.all.values():
            with pytest.raises(
                RedisUnavailable, match=rf"the sentinels name {master.address}, which is a replica"
            ):
                await way()
        assert not link.is_connected and link.break_total == 1
        await master.ask("REPLICAOF", "NO", "ONE")
        await ways.until_once()
        ways.close()


async def test_sentinels_that_are_down_or_frozen_are_passed_over(calm: SentinelSet) -> None:
    """The next of the list is asked. Without any, open connections go on, and a new link is told about each."""
    first, second, third = calm.sentinels
    first.signal(signal.SIGSTOP)
    second.kill()
    async with linked(calm.url) as link:
        ways = Ways(link)
        async with patience(1.8):
            await link.execute("PING")
        async with patience(0.9):  # the one that answered is asked first
            await ways.once()
        third.kill()
        await ways.once()
        async with linked(calm.url) as fresh:
            asked = (fresh.execute("PING"), fresh.scripts(WRITE, [(("x",), ())]))
            async with patience(1.8):
                told = await asyncio.gather(*asked, return_exceptions=True)
            for each in told:
                assert isinstance(each, RedisUnavailable)
                assert f"{first.address}: no answer within 1 s" in str(each)
                assert f"{second.address}: " in str(each) and f"{third.address}: " in str(each)
            assert fresh.break_total == 1
        assert (link.is_connected, link.break_total) == (True, 0)
        ways.close()


async def test_what_the_sentinels_name_must_be_a_master(calm: SentinelSet, tmp_path: Path) -> None:
    """A replica, a Redis that is down, and an unknown name: a sentence with the address or the name."""
    replica = calm.data[1]
    liar = calm.extra_sentinel(replica.port)
    gone = calm.extra_sentinel(1)
    try:
        for server in (liar, gone):
            server.start()
            await server.reaches("True", "PING")
        for server, words in (
            (liar, f"the sentinels name {replica.address}, which is a replica"),
            (gone, r"127\.0\.0\.1(:1\.|', 1\))"),
        ):
            async with linked(calm.url_of([server])) as link:
                for ask in (link.execute("PING"), link.scripts(WRITE, [(("x",), ())])):
                    with pytest.raises(RedisUnavailable, match=words):
                        await ask
            for way in ("execute", "script"):
                async with linked(calm.url_of([server, *calm.sentinels])) as link:
                    ways = Ways(link)
                    with pytest.raises(RedisUnavailable):
                        await ways.all[way]()
                    await asyncio.sleep(REUSE_S)
                    await ways.all[way]()  # asked another sentinel
        async with linked(calm.url_of(calm.sentinels, "other")) as link:
            with pytest.raises(RedisUnavailable, match=r'the sentinels know no master named "other"$'):
                await link.execute("PING")
    finally:
        liar.kill()
        gone.kill()


async def test_the_pool_is_bounded(calm: SentinelSet) -> None:
    """Some hundred commands while the master stalls: all are answered, over at most the maximum of connections."""
    master = calm.data[0]
    async with linked(calm.url) as link:
        before = await connections(master)
        await master.ask("CLIENT", "PAUSE", 300, "ALL")
        answers = await asyncio.gather(*(link.execute("ECHO", "here") for _ in range(300)))
        assert answers == [b"here"] * 300
        assert 1 <= await connections(master) - before <= CONNECTIONS_MAX


async def connections(server: Server) -> int:
    """Return the connections of `server`, those of replicas left out."""
    return str(await server.ask("CLIENT", "LIST", "TYPE", "normal")).count(" addr=")


async def test_a_command_without_an_answer_is_not_sent_again(calm: SentinelSet) -> None:
    """In no way of writing: the connection is lost while the command waits in Redis, and its effect is unknown."""
    master = calm.data[0]
    async with linked(calm.url) as link:
        ways = Ways(link)
        await ways.once()
        await master.ask("CLIENT", "PAUSE", 60_000, "WRITE")
        tasks = [asyncio.ensure_future(way()) for way in ways.all.values()]
        await master.reaches(f"'blocked_clients': {len(tasks)}", "INFO", "clients")
        await master.ask("CLIENT", "KILL", "TYPE", "normal")
        await master.ask("CLIENT", "UNPAUSE")
        told = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in told] == [RedisUnavailable] * len(tasks), told
        await link.execute("SET", "after", "the pause")
        assert [await count(master, name) for name in ways.all] == [1] * len(tasks)
        assert link.break_total == 1
        ways.close()


async def test_passwords_of_redis_and_of_the_sentinels(binary: Path, tmp_path: Path) -> None:
    """Both are needed. A wrong or missing one is reported as such, and not shown."""
    made = SentinelSet(
        binary, tmp_path, password="correct-horse", sentinel_password="other-horse", down_after_ms=NEVER_MS
    )
    async with running(made) as servers:
        async with linked(servers.url) as link, listening(link) as listener:
            ways = Ways(link)
            await ways.once()
            await listener.hears(link, "here")
            ways.close()
            await link.execute("SET", "kvmesh:proc:decode-0", "lease")
        async with linked(f"{servers.url}&sentinel_username=asker") as link:
            await Ways(link).all["script"]()
            await link.execute("PING")
        assert SENTINEL_RIGHTS in (ROOT / "docs" / "security.md").read_text()
        assert await leased_names(servers.url, "kvmesh", ["decode-0", "decode-1"], 0) == ["decode-0"]
        assert await redis_fault(servers.url) == ""
        assert await redis_fault(without_password(servers.url)) == "not known: the URL is masked"
        assert PASSWORD_REFUSED in await redis_fault(servers.url.partition("?")[0])
        assert 'no master named "other"' in await redis_fault(servers.url.replace(SERVICE, "other"))
        for wrong in (
            servers.url.replace("correct-horse", "wrong-horse"),
            servers.url.replace("other-horse", "wrong-horse"),
            servers.url.replace(":correct-horse@", ""),
            servers.url.partition("?")[0],
        ):
            async with linked(wrong) as link:
                for ask in (link.execute("PING"), link.scripts(WRITE, [(("x",), ())])):
                    with pytest.raises(RedisUnavailable, match=PASSWORD_REFUSED) as told:
                        await ask
                    assert "horse" not in str(told.value)


ON_EVERY_REDIS = (test_a_demoted_master_gets_no_second_write,)
"""Their answers differ by the version of Redis. The other tests run on each Redis with --every-redis."""
