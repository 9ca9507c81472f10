"""Messages of RedisLink for errors of the client library, without a Redis."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable

import pytest
from redis.exceptions import AuthenticationError, RedisClusterException
from redis.exceptions import ConnectionError as RedisConnectionError

from kvmesh.config import ConfigError
from kvmesh.redis_link import RedisLink, RedisUnavailable
from tests.unit.answering_server import answering_server

REFUSES = "asks for a password, or refuses the one of this URL"


async def fail(error: Exception, cause: Exception | None = None) -> None:
    """Fail as a call of the client library does."""
    raise error from cause


async def told(link: RedisLink, call: Awaitable[None]) -> str:
    """Return the sentence of a call that fails."""
    with pytest.raises(RedisUnavailable) as away:
        await link.guarded(call)
    return str(away.value)


async def test_a_refused_password_is_no_outage() -> None:
    """A refused password is no outage, also in the Cluster client's own error around it."""
    wrapped = RedisClusterException("Redis Cluster cannot be connected. Please provide one reachable node.")
    for url, error, cause in (
        ("redis://127.0.0.1:1", AuthenticationError("WRONGPASS"), None),
        ("redis+cluster://127.0.0.1:1", wrapped, AuthenticationError("WRONGPASS")),
    ):
        link = RedisLink(url)
        sentence = await told(link, fail(error, cause))
        assert REFUSES in sentence and "away" not in sentence
        assert "is unavailable" in await told(link, fail(RedisConnectionError("Connection refused")))
        await link.close()


async def test_a_fault_is_logged_once_and_again_when_it_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A fault is logged once, and again when its cause changes.

    A Redis that returns with another password is one break and two lines.
    """
    link = RedisLink("redis://127.0.0.1:1")
    errors = [RedisConnectionError("Connection refused")] * 3 + [AuthenticationError("WRONGPASS")] * 3
    with caplog.at_level(logging.WARNING, "kvmesh.redis_link"):
        for error in errors:
            await told(link, fail(error))
    await link.close()
    assert [record.getMessage() for record in caplog.records] == [
        "Redis at redis://127.0.0.1:1 is unavailable: Connection refused",
        f"Redis at redis://127.0.0.1:1 {REFUSES}: WRONGPASS",
    ]
    assert link.break_total == 1


@pytest.mark.parametrize(("scheme", "is_new"), [("redis+sentinel", False), ("redis", True)])
async def test_a_command_of_an_earlier_outage_is_no_new_one(scheme: str, is_new: bool) -> None:
    """A command that began before the connection to the new master fails later: the outage is counted already.

    Without sentinels it may be another outage: Redis restarts at once.
    """
    link = RedisLink(f"{scheme}://127.0.0.1:1/0")
    error = RedisConnectionError("Timeout reading from socket")
    ends = asyncio.Event()

    async def late() -> None:
        await ends.wait()
        raise error

    async def answered() -> bytes:
        return b"PONG"

    await told(link, fail(error))
    waiting = asyncio.create_task(told(link, late()))
    await asyncio.sleep(0)
    assert await link.guarded(answered()) == b"PONG"
    ends.set()
    assert "is unavailable" in await waiting
    assert (link.break_total, link.is_connected) == ((2, False) if is_new else (1, True))
    await told(link, fail(error))
    assert (link.break_total, link.is_connected) == (2, False)
    await link.close()


@pytest.mark.parametrize("option", ["horse=1", "ssl_cert_reqs=horse", "socket_timeout=horse"])
def test_a_wrong_option_is_refused(option: str) -> None:
    """An unknown option of the URL, and a wrong value: one error, not that of the client library."""
    with pytest.raises(ConfigError, match=r"cannot be used\. Allowed is"):
        RedisLink(f"rediss://127.0.0.1:1/0?{option}")


async def test_a_refused_write_keeps_the_dedicated_connection() -> None:
    """A Redis that is a replica refuses each write. Without sentinels there is no other one to connect to."""
    opened = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        while await reader.read(1000):
            writer.write(b"-READONLY You can't write against a read only replica.\r\n")

    async with answering_server(refuse) as port:
        link = RedisLink(f"redis://127.0.0.1:{port}/0")
        for _ in range(3):
            with pytest.raises(RedisUnavailable, match="READONLY"):
                await link.pipeline([("SET", "key", "value")])
        await link.close()
    assert opened == 1
