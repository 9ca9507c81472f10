"""A Redis that answers with errors ends no task: all tasks retry, and catch up when commands work again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from kvmesh.membership.member import LEASE_S, Member
from kvmesh.membership.membership import Membership, read_members
from kvmesh.membership.registration import Registration
from kvmesh.prefix_index.publisher import Publisher
from kvmesh.redis_link import RedisLink, RedisUnavailable
from kvmesh.tasks import end
from services.router.gossip.dispatch_gossip import DispatchGossip
from services.router.index.index_reader import IndexReader
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.policy import Started
from tests.patience import patience

OOM = (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0"))
NO_REPLICAS = (
    ("CONFIG", "SET", "min-replicas-to-write", "1"),
    ("CONFIG", "SET", "min-replicas-to-write", "0"),
)
NO_PERMISSION = (("ACL", "SETUSER", "default", "-eval", "-xadd"), ("ACL", "SETUSER", "default", "+@all"))
DEMOTED = (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE"))
FAULTS = {"oom": OOM, "no-replicas": NO_REPLICAS, "no-permission": NO_PERMISSION, "demoted": DEMOTED}
SNAPSHOT = {
    "boot_id": "engine",
    "event_id": 1,
    "snapshot": [
        {"type": "stored", "parent_hash": None, "blocks": [{"block_hash": 1, "tokens": [1, 2, 3, 4]}]}
    ],
}


def member(name: str) -> Member:
    return Member(
        process_id=name,
        role="prefill",
        address="127.0.0.1:1",
        boot_id=f"boot-{name}",
        model_version="m",
        block_tokens=4,
        term=1,
    )


async def until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    async with patience(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def control(redis_server: Any) -> AsyncIterator[RedisLink]:
    """A connection of the test's own."""
    link = RedisLink(redis_server.url)
    yield link
    await link.close()


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
async def test_every_loop_survives_a_redis_that_rejects_writes(
    fault: tuple[tuple[str, ...], tuple[str, ...]], redis_server: Any, control: RedisLink
) -> None:
    """For longer than a lease no write succeeds: no process ends, no member is missed, and all state is back
    afterwards.
    """
    link = RedisLink(redis_server.url)
    registrations = [Registration(link, "m", member(name)) for name in ("a", "b")]
    views: list[list[str]] = []
    membership = Membership(
        link,
        "m",
        lambda members: views.append([one.process_id for one in members]),
        own=registrations[0],
    )
    publisher = Publisher(link, "m", "a", 4, "m", snapshot_interval_s=0.5)
    publisher.on_engine_message(SNAPSHOT)
    reader = IndexReader(link, "m", LocalPrefixIndex())
    dispatches = DispatchGossip(
        link, "m", "router-0", "boot", lambda event: None, lambda router: {}, lambda replica: True
    )
    dispatches.set_routers([("router-1", "boot-1")])
    reader.set_replicas(["a"])
    parts: Sequence[Any] = (*registrations, membership, publisher, reader, dispatches)
    tasks = [asyncio.create_task(part.run()) for part in parts]
    try:
        await until(lambda: membership.members == [member("a"), member("b")])
        await until(lambda: reader.is_caught_up and publisher.snapshot_total > 0)
        views.clear()
        await control.execute(*fault[0])
        dispatches.publish(Started("router-0", "a" * 32, 0.0))
        await until(lambda: all(one.is_refused for one in registrations))
        async with patience(2 * LEASE_S):
            while await read_members(control, "m") and fault is not DEMOTED:
                await asyncio.sleep(0.05)
        assert not any(task.done() for task in tasks)
        assert membership.members == [member("a"), member("b")] and dispatches.exchange.dropped_total == 1
        before = publisher.snapshot_total
        await control.execute(*fault[1])
        await until(lambda: not any(one.is_refused for one in registrations))
        await until(lambda: publisher.snapshot_total > before)
        assert await read_members(control, "m") == [member("a"), member("b")]
        assert not [view for view in views if view != ["a", "b"]]
        assert not any(task.done() for task in tasks)
    finally:
        await end(tasks)
        await link.close()


async def test_every_error_of_redis_raises_redis_away(redis_server: Any, control: RedisLink) -> None:
    """For every kind of command the error is RedisUnavailable, the one error that callers handle."""
    link = RedisLink(redis_server.url)
    command = ("SET", "x", "1")
    script = ("EVAL", "redis.call('GET', KEYS[1]) redis.call('SET', KEYS[1], 1)", 1, "x")
    faults = {**FAULTS, "no-permission": (("ACL", "SETUSER", "default", "-set"), NO_PERMISSION[1])}
    for name, fault in faults.items():
        blocked = asyncio.create_task(link.execute("XREAD", "BLOCK", 700, "STREAMS", "s", "0-0"))
        await link.execute("PING")
        await control.execute(*fault[0])
        with pytest.raises(RedisUnavailable):
            await link.execute(*command)
        for atomic in (False, True):
            with pytest.raises(RedisUnavailable):
                await link.pipeline([command, command], atomic=atomic)
        with pytest.raises(RedisUnavailable):
            await link.execute(*script)
        if fault is DEMOTED:
            with pytest.raises(RedisUnavailable):
                await blocked
        else:
            assert not await blocked, name
        await control.execute(*fault[1])
    await link.execute("SADD", "of-another-type", "1")
    with pytest.raises(RedisUnavailable, match="WRONGTYPE"):
        await link.execute("GET", "of-another-type")
    await link.close()


async def test_a_repeated_error_is_logged_once(
    redis_server: Any, control: RedisLink, caplog: pytest.LogCaptureFixture
) -> None:
    """A repeated error is one line in the log, however often the command is tried and whatever else succeeds."""
    caplog.set_level(logging.INFO)
    link = RedisLink(redis_server.url)
    for command, level in ((OOM, "WARNING"), (NO_REPLICAS, "WARNING")):
        await control.execute(*command[0])
        caplog.clear()
        for value in range(5):
            with pytest.raises(RedisUnavailable):
                await link.pipeline([("SET", "x", value), ("SADD", "y", value)])
            await link.execute("PING")
        told = [record for record in caplog.records if "refuses SADD+SET" in record.message]
        assert [record.levelname for record in told] == [level]
        assert link.is_connected and link.break_total == 0, "it is there"
        await control.execute(*command[1])
        await link.pipeline([("SET", "x", 1), ("SADD", "y", 1)])
    caplog.clear()
    for _ in range(5):
        with pytest.raises(RedisUnavailable):
            await link.execute("LPUSH", "x", 1)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    await link.close()
