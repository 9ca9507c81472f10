"""Leases and views on a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from kvmesh.membership.member import Member
from kvmesh.membership.membership import Membership, read_members
from kvmesh.membership.registration import Registration
from kvmesh.redis_link import RedisLink
from kvmesh.tasks import end
from tests.patience import patience


def member(name: str) -> Member:
    return Member(
        process_id=name,
        role="prefill",
        address="127.0.0.1:1",
        boot_id=f"boot-{name}",
        model_version="m",
        block_tokens=32,
        capabilities=("kv_events",),
        term=1,
    )


def boot(name: str, boot_id: str) -> Member:
    return msgspec.structs.replace(member(name), boot_id=boot_id)


async def holder(link: RedisLink) -> str:
    """Return the boot that is listed, or an empty text."""
    found = await read_members(link, "m")
    return found[0].boot_id if found else ""


async def until_holder(link: RedisLink, wanted: str) -> None:
    """Wait until `wanted` is listed."""
    async with patience(10):
        while await holder(link) != wanted:
            await asyncio.sleep(0.01)


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with patience(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_members_appear_change_and_leave(redis_server: Any) -> None:
    """A registration and its changes are seen by notification, and a deregistration removes the member at once."""
    link, seen = RedisLink(redis_server.url), list[Any]()
    one, two = Registration(link, "m", member("a")), Registration(link, "m", member("b"))
    membership = Membership(link, "m", seen.append)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(part.run()) for part in (membership, one, two)]
        await until(lambda: [m.process_id for m in membership.members] == ["a", "b"])
        one.update(draining=True)
        await until(lambda: membership.members[0].draining, 0.9)
        running[2].cancel()
        await two.deregister()
        await until(lambda: [m.process_id for m in membership.members] == ["a"], 0.9)
        assert [m.process_id for m in seen[-1]] == ["a"]
        for task in running:
            task.cancel()
    await link.close()


async def test_a_process_is_known_from_its_first_lease_on(redis_server: Any) -> None:
    """Not before, while Redis is away, and not less during a later outage."""
    redis_server.stop()
    link = RedisLink(redis_server.url)
    registration = Registration(link, "m", member("a"))
    running = asyncio.create_task(registration.run())

    def is_known() -> bool:
        return registration.has_held

    await until(lambda: registration.is_refused)
    assert not is_known()
    await redis_server.start()
    await until(is_known)
    assert await holder(link) == member("a").boot_id
    redis_server.stop()
    await until(lambda: registration.is_refused)
    assert is_known()
    running.cancel()
    await link.close()


async def test_the_view_survives_the_loss_of_redis_data(redis_server: Any) -> None:
    """Redis is killed and comes back empty: the view loses no member, and the leases are restored."""
    link = RedisLink(redis_server.url)
    seen: list[list[Member]] = []
    registration = Registration(link, "m", member("a"))
    membership = Membership(link, "m", seen.append)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(part.run()) for part in (membership, registration)]
        await until(lambda: bool(membership.members))
        redis_server.stop()
        await until(lambda: not link.is_connected)
        await redis_server.start()
        await until(lambda: link.is_connected)
        async with patience(5):
            found: list[Member] = []
            while not found:
                found = await read_members(link, "m")
                await asyncio.sleep(0.02)
        assert found == [member("a")]
        assert all(view for view in seen if view is not seen[0])
        assert membership.members == [member("a")]
        for task in running:
            task.cancel()
    await link.close()


async def test_an_old_process_does_not_take_its_successors_lease(redis_server: Any) -> None:
    """A restarted process keeps its lease when the old process deregisters late."""
    link = RedisLink(redis_server.url)
    old, new = Registration(link, "m", member("a")), Registration(link, "m", boot("a", "boot-new"))
    task = asyncio.create_task(new.run())
    async with patience(5):
        while not await read_members(link, "m"):
            await asyncio.sleep(0.01)
    await old.deregister()
    assert [m.boot_id for m in await read_members(link, "m")] == ["boot-new"]
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await new.deregister()
    assert await read_members(link, "m") == []
    await link.close()


@pytest.mark.parametrize("state", ["serving", "warming", "quarantined"])
async def test_a_newer_process_keeps_the_name(
    redis_server: Any, caplog: pytest.LogCaptureFixture, state: str
) -> None:
    """Two processes with one name: the one started later has the lease, also after a flush; the older one logs that
    once.

    A replica that is held or quarantined says `draining` and keeps its name, too.
    """
    link = RedisLink(redis_server.url)
    old, new = Registration(link, "m", boot("a", "old")), Registration(link, "m", boot("a", "new"))
    new.update(state=state, draining=state != "serving")
    tasks = [asyncio.create_task(old.run())]
    try:
        await until_holder(link, "old")
        tasks.append(asyncio.create_task(new.run()))
        await until_holder(link, "new")
        await link.execute("FLUSHALL")
        old.update(kv_address="x")  # the older one may be the first to write again
        await until(lambda: old.is_superseded)
        await until_holder(link, "new")
        old.update(kv_address="y")
        new.update(kv_address="z")
        await until(lambda: not new._changed.is_set())
        assert not new.is_superseded and [task.done() for task in tasks] == [False, False]
        await old.deregister()
        async with patience(5):
            while not (found := await read_members(link, "m")) or found[0].kv_address != "z":
                await asyncio.sleep(0.01)
        assert [m.boot_id for m in found] == ["new"]
        assert sum(record.message.startswith("superseded") for record in caplog.records) == 1
        assert old.superseded_total == 1
    finally:
        await end(tasks)
        await link.close()


async def test_a_lease_that_comes_back_is_announced(redis_server: Any) -> None:
    """A process that was frozen until its lease expired is found at once after SIGCONT, not at the next poll."""
    link = RedisLink(redis_server.url)
    registration = Registration(link, "m", member("a"))
    task = asyncio.create_task(registration.run())
    subscription = link.subscription()
    try:
        async with patience(10):
            while not await read_members(link, "m"):
                await asyncio.sleep(0.01)
            await subscription.subscribe("m:proc-news")
            for _ in range(3):
                assert await subscription.get_message(timeout=0.6) is None, "a renewal sends no notification"
            await link.execute("DEL", "m:proc:a")
            news = None
            while news is None:
                news = await subscription.get_message(timeout=1.0)
        assert news["data"] == b"a"
        assert await read_members(link, "m") == [member("a")]
    finally:
        await subscription.aclose()
        await end([task])
        await link.close()


@pytest.mark.parametrize("how", ["term", "kill", "forged"])
async def test_the_name_comes_back_to_the_process_that_lost_it(redis_server: Any, how: str) -> None:
    """A second process of the same name takes the name, and releases it at its end; a forged lease lasts until it
    expires.
    """
    link = RedisLink(redis_server.url)
    old, new = Registration(link, "m", boot("a", "old")), Registration(link, "m", boot("a", "new"))
    membership = Membership(link, "m", lambda members: None, own=old)
    running = [asyncio.create_task(part.run()) for part in (old, membership)]
    second = None
    try:
        await until_holder(link, "old")
        if how == "forged":
            lease = msgspec.json.encode(boot("a", "new"))
            await link.execute("SET", "m:proc:a", lease, "PX", 3000)
        else:
            second = asyncio.create_task(new.run())
        await until_holder(link, "new")
        async with patience(5):
            while not old.is_superseded:
                await asyncio.sleep(0.01)
        if second is not None:
            await end([second])
        if how == "term":
            await new.deregister()
        await until_holder(link, "old")
        assert not old.is_superseded
    finally:
        await end([*running, *([second] if second else [])])
        await link.close()
