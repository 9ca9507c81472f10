"""Answers of sentinels, and of what they name, that no Redis gives: each is an unavailable Redis, in one sentence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvmesh.cli.readiness import redis_fault
from kvmesh.redis_link import RedisLink, RedisUnavailable
from kvmesh.redis_script import Script
from kvmesh.redis_url import PASSWORD_REFUSED
from tests.unit.answering_server import answering_server


@asynccontextmanager
async def answering(answer: bytes, asked: list[bytes] | None = None) -> AsyncIterator[int]:
    """Yield the port of a server that sends `answer` for whatever it reads, which is added to `asked`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while read := await reader.read(1000):
            if asked is not None:
                asked.append(read)
            writer.write(answer)

    async with answering_server(serve) as port:
        yield port


async def told(port: int) -> list[str]:
    """Return the sentences of a command and of a script with the sentinel at `port`."""
    link = RedisLink(f"redis+sentinel://127.0.0.1:{port}/service?socket_timeout=0.2")
    try:
        asked = (link.execute("PING"), link.scripts(Script("return 1"), [((), ())]))
        found = [await asyncio.gather(each, return_exceptions=True) for each in asked]
        assert [type(one) for (one,) in found] == [RedisUnavailable] * 2, found
        return [str(one) for (one,) in found]
    finally:
        await link.close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"$-1\r\n", 'the sentinels know no master named "service"'),
        (b"*-1\r\n", 'the sentinels know no master named "service"'),
        (b"+OK\r\n", "the answer is no address"),
        (b":5\r\n", "the answer is no address"),
        (b"*0\r\n", "the answer is no address"),
        (b"*2\r\n$1\r\na\r\n$1\r\nb\r\n", "the answer is no address"),
        (b"*2\r\n$1\r\na\r\n:6379\r\n", "the answer is no address"),
        (b"*2\r\n$1\r\na\r\n$5\r\n65536\r\n", "the answer is no address"),
        (b"*2\r\n$0\r\n\r\n$1\r\n1\r\n", "the answer is no address"),
        (b"*2\r\n$1\r\n\xff\r\n$1\r\n1\r\n", "the answer is no address"),
        (b"*2\r\n$4\r\na..b\r\n$1\r\n1\r\n", "the answer is no address"),
        (b"*2\r\n$3\r\na\0b\r\n$1\r\n1\r\n", "the answer is no address"),
        (b"*2\r\n$64\r\n%s\r\n$1\r\n1\r\n" % (64 * b"a"), "the answer is no address"),
        (b"*3\r\n:1\r\n:1\r\n:1\r\n", "the answer is no address"),
        (b"-ERR unknown command\r\n", "unknown command"),
        (b"-NOPERM no rights\r\n", "no rights"),
        (b"-READONLY no\r\n", "no sentinel names the master"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "Protocol"),
    ],
)
async def test_an_answer_of_a_sentinel_that_cannot_be_used(answer: bytes, words: str) -> None:
    """By both kinds of connections."""
    async with answering(answer) as port:
        for sentence in await told(port):
            assert words in sentence and "is unavailable" in sentence


@pytest.mark.parametrize("host", ["a..b", "a%00b", 64 * "a"])
@pytest.mark.parametrize("url", ["redis+sentinel://{}/service", "redis://{}/0"])
async def test_a_host_that_no_connection_takes(url: str, host: str) -> None:
    """In the URL: an unavailable Redis, too."""
    link = RedisLink(url.format(host))
    for ask in (link.execute("PING"), link.scripts(Script("return 1"), [((), ())])):
        with pytest.raises(RedisUnavailable, match="is unavailable"):
            await ask
    await link.close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"*2\r\n$4\r\nrole\r\n$7\r\nreplica\r\n", "which is a replica"),
        (b"*2\r\n$4\r\nmode\r\n$8\r\nsentinel\r\n", "which is a server without the role"),
        (b"*1\r\n$4\r\nrole\r\n", "which is a server without the role"),
        (b"+OK\r\n", "which is a server without the role"),
        (b":1\r\n", "which is a server without the role"),
        (b"-ERR unknown command\r\n", "unknown command"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "Protocol"),
    ],
)
async def test_what_a_sentinel_names_is_no_master(answer: bytes, words: str) -> None:
    """By both kinds of connections."""
    async with answering(answer) as named:
        told_address = f"*2\r\n$9\r\n127.0.0.1\r\n${len(str(named))}\r\n{named}\r\n".encode()
        async with answering(told_address) as port:
            for sentence in await told(port):
                assert words in sentence


@pytest.mark.parametrize(
    ("login", "option", "fault"),
    [
        ("", "?sentinel_password=***", "not known: the URL is masked"),
        (
            "***@",
            "?sentinel_username=***&sentinel_password=***&socket_timeout=1",
            "not known: the URL is masked",
        ),
        ("***@", "", "not known: the URL is masked"),
        ("", "?sentinel_password=wrong", f"it {PASSWORD_REFUSED}"),
    ],
)
async def test_a_sentinel_that_refuses_proves_no_redis(login: str, option: str, fault: str) -> None:
    """mesh.json has masked passwords, and `kvmesh status` may have no other URL. Nothing is asked with a mask."""
    asked: list[bytes] = []
    async with answering(b"-NOAUTH Authentication required.\r\n", asked) as port:
        assert await redis_fault(f"redis+sentinel://{login}127.0.0.1:{port}/service{option}") == fault
    assert asked and b"***" not in b"".join(asked)


async def test_a_masked_url_of_sentinels_without_a_password_is_asked() -> None:
    """The Redis refuses, so it answers."""
    async with answering(b"-NOAUTH Authentication required.\r\n") as named:
        told_address = f"*2\r\n$9\r\n127.0.0.1\r\n${len(str(named))}\r\n{named}\r\n".encode()
        async with answering(told_address) as port:
            assert await redis_fault(f"redis+sentinel://***@127.0.0.1:{port}/service") == ""
