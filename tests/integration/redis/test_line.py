"""The connection for scripts: kept open, reopened after a break, and never off by one answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from kvmesh.redis_dedicated_link import field_of
from kvmesh.redis_link import RedisLink, RedisUnavailable
from kvmesh.redis_script import Script
from tests.patience import patience

ECHO = Script("return ARGV[1]")
READ = Script("return redis.call('GET', KEYS[1])")


@pytest_asyncio.fixture
async def link(redis_url: str) -> AsyncIterator[RedisLink]:
    """A link that waits 0.5 s for an answer."""
    link = RedisLink(f"{redis_url}?socket_timeout=0.5")
    yield link
    await link.close()


@pytest_asyncio.fixture
async def other(redis_url: str) -> AsyncIterator[RedisLink]:
    """A second link."""
    link = RedisLink(redis_url)
    yield link
    await link.close()


async def echo(link: RedisLink, *words: str) -> list[bytes]:
    """Return `words` as Redis formats them."""
    return await link.scripts(ECHO, [((), (word,)) for word in words])


async def others(link: RedisLink) -> list[int]:
    """Return the ids of all connections of Redis except that of `link`."""
    mine = await link.execute("CLIENT", "ID")
    lines = bytes(await link.execute("CLIENT", "LIST")).decode().splitlines()
    ids = (int(line.split()[0].partition("=")[2]) for line in lines)
    return [each for each in ids if each != mine]


async def test_scripts_share_one_connection_and_those_at_once_find_another(
    link: RedisLink, other: RedisLink
) -> None:
    """Consecutive scripts use the same connection; concurrent scripts get their own answers."""
    await echo(link, "first")
    held = await others(other)
    assert len(held) == 1
    for at in range(20):
        assert await echo(link, f"{at}", "x") == [b"%d" % at, b"x"]
    assert await others(other) == held
    answers = await asyncio.gather(*(echo(link, f"{at}a", f"{at}b") for at in range(20)))
    assert answers == [[b"%da" % at, b"%db" % at] for at in range(20)]
    assert await link.scripts(ECHO, []) == []


async def test_what_redis_closed_is_opened_again(link: RedisLink, other: RedisLink) -> None:
    """The next caller gets no error."""
    for word in ("a", "b", "c"):
        assert await echo(link, word) == [word.encode()]
        for each in await others(other):
            await other.execute("CLIENT", "KILL", "ID", each)
        await asyncio.sleep(0)
        async with patience(5):
            while await others(other):
                await asyncio.sleep(0.001)
    assert link.break_total == 1 or link.is_connected


@pytest.mark.parametrize("ends", ["silence", "closed", "cancelled"])
async def test_a_late_answer_reaches_no_other_caller(link: RedisLink, other: RedisLink, ends: str) -> None:
    """A command without an answer in time: the next command gets its own answer, not the late one."""
    await echo(link, "before")
    (held,) = await others(other)
    await other.execute("CLIENT", "PAUSE", 1000, "WRITE" if ends == "closed" else "ALL")
    writing = Script("return {redis.call('SET', 'x', ARGV[1]), ARGV[1]}")
    asking = asyncio.create_task(link.scripts(writing, [((), ("late",))]))
    if ends == "cancelled":
        await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    elif ends == "closed":
        await asyncio.sleep(0.01)
        await other.execute("CLIENT", "KILL", "ID", held)
        with pytest.raises(RedisUnavailable, match="closed the connection"):
            await asking
    else:
        with pytest.raises(RedisUnavailable, match=r"no answer within 0\.5 s"):
            await asking
    async with patience(5):
        while True:
            try:
                assert await echo(link, "next") == [b"next"]
                break
            except RedisUnavailable:
                await asyncio.sleep(0.05)
    assert held not in await others(other)


async def test_a_cancel_at_any_turn_leaves_the_connection_in_order(link: RedisLink) -> None:
    """Before the connection is open, during the write, during the wait, and when the answer arrives."""
    for turns in range(60):
        if turns % 7 == 0:
            await link.close()
        asking = asyncio.create_task(echo(link, "dropped", "dropped too"))
        for _ in range(turns % 12):
            await asyncio.sleep(0)
        if not asking.done():
            asking.cancel()
            await asyncio.wait([asking], timeout=60)
            assert asking.cancelled(), f"after {turns % 12} turns"
        assert await echo(link, f"{turns}") == [b"%d" % turns]


async def test_user_password_and_database_are_those_of_the_url(redis_url: str, other: RedisLink) -> None:
    """The same as for all other commands; a wrong password raises RedisUnavailable, and is not quoted."""
    place = urlsplit(redis_url).netloc
    await other.execute("ACL", "SETUSER", "liner", "on", ">secret-horse", "~*", "+@all")
    try:
        for login in ("liner:secret-horse@", ""):
            mine = RedisLink(f"redis://{login}{place}/3")
            await mine.execute("SET", "here", login)
            assert await mine.scripts(READ, [(("here",), ())]) == [login.encode()]
            await mine.close()
        wrong = RedisLink(f"redis://liner:wrong-horse@{place}/3")
        with pytest.raises(RedisUnavailable) as away:
            await wrong.scripts(READ, [(("here",), ())])
        assert "horse" not in str(away.value) and "refuses the one of this URL: WRONGPASS" in str(away.value)
        await wrong.close()
    finally:
        await other.execute("ACL", "DELUSER", "liner")


async def test_a_failed_script_differs_from_an_unavailable_redis(link: RedisLink) -> None:
    """The connection stays open, and the other scripts of the batch were run."""
    await echo(link, "x")
    with pytest.raises(RedisUnavailable) as away:
        await link.scripts(Script("return redis.call(ARGV[1])"), [((), ("PING",)), ((), ("NONSENSE",))])
    assert not away.value.is_transient and link.is_connected
    assert await echo(link, "y") == [b"y"]


async def test_a_redis_at_its_connection_limit_is_unavailable(link: RedisLink, other: RedisLink) -> None:
    """The error is the same for all commands: no command is wrong."""
    (_, most) = await other.execute("CONFIG", "GET", "maxclients")
    await other.execute("CONFIG", "SET", "maxclients", 1)
    try:
        for _ in range(20):  # the error may be read, or the end of the connection before it
            with pytest.raises(RedisUnavailable) as away:
                await echo(link, "x")
            assert away.value.is_transient and not link.is_connected, away.value
    finally:
        await other.execute("CONFIG", "SET", "maxclients", int(most))
    assert await echo(link, "y") == [b"y"]


async def test_a_blocking_command_has_a_connection_of_its_own(link: RedisLink, other: RedisLink) -> None:
    """A blocking read delays no script. A refusal, and a connection lost during the read, are RedisUnavailable."""
    reads = link.dedicated()
    read = ("XREAD", "BLOCK", 400, "STREAMS", "stream", "0-0")
    blocked = asyncio.create_task(reads.execute(*read))
    async with patience(5):
        while not await others(other):
            await asyncio.sleep(0.001)
    for word in ("a", "b"):
        assert await echo(link, word) == [word.encode()]
    assert not blocked.done()
    await other.execute("XADD", "stream", "7-0", "f", "x", "g", "y")
    for answer in (await blocked, await reads.execute(*read), await link.execute(*read)):
        ((name, ((entry_id, fields),)),) = answer
        assert (name, entry_id) == (b"stream", b"7-0")
        assert [field_of(fields, each) for each in (b"f", b"g", b"h")] == [b"x", b"y", b""]
    assert field_of(None, b"f") == b"", "a removed entry has no fields"
    await other.execute("SET", "text", "x")
    with pytest.raises(RedisUnavailable, match="refuses XADD: WRONGTYPE"):
        await reads.execute("XADD", "text", "*", "f", "x")
    lost = asyncio.create_task(reads.execute(*read[:4], "stream", "7-0"))
    await asyncio.sleep(0)
    for each in await others(other):
        await other.execute("CLIENT", "KILL", "ID", each)
    with pytest.raises(RedisUnavailable, match="is unavailable"):
        await lost
    assert await reads.execute("XLEN", "stream") == 1
    with suppress(RedisUnavailable):  # the link may not know yet that its connection was killed, too
        await echo(link, "c")
    await echo(link, "d")
    assert len(await others(other)) == 2, "that of the reads, and that of the scripts"
    reads.close()
