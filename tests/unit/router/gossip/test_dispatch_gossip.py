"""The shell of the gossip yields to the event loop, whatever entries it reads."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from services.router.cooperative_yield import SLICE_S
from services.router.gossip import messages
from services.router.gossip.dispatch_gossip import DispatchGossip
from services.router.gossip.exchange import Exchange
from services.router.gossip.messages import FIELD, Entry
from services.router.gossip.peer_routers import PeerRouters
from services.router.placement.policy import Dispatched, Event
from tests.patience import patience
from tests.unit.router.index.test_index_reader import SlowClock

NOTES = 60
EVERYBODY = [("r0", "boot-0"), ("r1", "boot-1")]


class FullRedis:
    """Its stream has the entries of another router, and returns all of them in one answer."""

    def __init__(self, entries: list[Entry]) -> None:
        self.commands: list[tuple[Any, ...]] = []
        self.answer: Any = [
            (b"stream", [(b"5-%d" % one.seq, {FIELD: messages.encode(one, 0.0)}) for one in entries])
        ]

    def dedicated(self) -> FullRedis:
        return self

    def close(self) -> None:
        pass

    async def execute(self, *command: Any) -> Any:
        self.commands.append(command)
        if command[0] == "XREAD" and self.answer is not None:
            answer, self.answer = self.answer, None
            return answer
        await asyncio.sleep(0.001 if command[0] == "XREAD" else 0)
        return []


def dispatched(number: int, blocks: int = 0) -> Dispatched:
    return Dispatched("r1", f"{number:032x}", "p0", tuple(range(blocks)), 0.1, 0.0, 1e9)


@pytest.mark.parametrize("entries", (1, NOTES))
async def test_entries_read_at_once_are_applied_in_slices(entries: int) -> None:
    """Sixty messages of a millisecond each leave turns to the event loop, in however many entries they came."""
    each = NOTES // entries
    told = [
        Entry("r1", "boot-1", 1 + at, [dispatched(at * each + message) for message in range(each)])
        for at in range(entries)
    ]
    assert await turns_until(told, NOTES) >= NOTES * 0.001 / (2 * SLICE_S)


async def turns_until(told: list[Entry], count: int) -> int:
    """Return the number of turns of the loop while `told` was read, until `count` messages were observed."""
    heard: list[Event] = []
    redis: Any = FullRedis(told)
    dispatches = DispatchGossip(
        redis, "m", "r0", "boot-0", heard.append, lambda _: {}, lambda _: True, SlowClock()
    )
    dispatches.set_routers(EVERYBODY)
    task = asyncio.create_task(dispatches.run())
    turns = 0
    async with patience(5):
        while len(heard) < count:
            await asyncio.sleep(0)
            turns += redis.answer is None
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return turns


async def test_entries_of_unknown_routers_take_no_turn() -> None:
    """Entries of an unknown router take no turn of the loop."""
    told = [Entry("r9", "boot-9", seq, [dispatched(seq)]) for seq in range(1, NOTES)]
    told.append(Entry("r1", "boot-1", NOTES, [dispatched(0)]))
    assert await turns_until(told, 1) >= NOTES * 0.001 / (2 * SLICE_S)


def test_the_rest_of_an_entry_is_dropped_when_its_router_is_lost() -> None:
    """A router is forgotten between two messages: its remaining messages are dropped."""
    heard: list[Event] = []
    peer_routers = PeerRouters("r0", "boot-0", heard.append, lambda _: {}, lambda _: True)
    peer_routers.set_routers({"r1": "boot-1"}, 0.0)
    slices = peer_routers.applying(Entry("r1", "boot-1", 1, [dispatched(1), dispatched(2)]), 0.0)
    next(slices)
    peer_routers.set_routers({"r1": "boot-2"}, 0.0)
    assert not list(slices)
    assert [each for each in heard if isinstance(each, Dispatched)] == [dispatched(1)]


def test_entries_are_short() -> None:
    """An entry is encoded and decoded without a yield. It has neither many small messages nor many blocks."""
    for blocks, count in ((0, 2000), (512, 200), (20_000, 3)):
        exchange = Exchange("r1", "boot-1", PeerRouters("r1", "boot-1", print, lambda _: {}, lambda _: True))
        exchange.set_routers(EVERYBODY, 0.0)
        for number in range(count):
            exchange.publish(dispatched(number, blocks), 0.0)
        told = 0
        while (entry := exchange.next_entry(0.0)) is not None:
            found = [message for message in entry.messages if isinstance(message, Dispatched)]
            told += len(found)
            assert exchange.has_rest == (told < count), "a router with more to write does not wait for it"
            assert len(entry.messages) <= 256
            assert len(found) <= 1 or len(messages.encode(entry, 0.0)) < 100_000
        assert told == count


@pytest.mark.parametrize(("pool", "key"), [("default", "m:dispatches"), ("next", "m:dispatches:next")])
async def test_each_pool_has_a_stream_of_its_own(pool: str, key: str) -> None:
    """Routers of two pools never read each other's entries. The default pool keeps the key of release 0.1.0."""
    redis: Any = FullRedis([])
    dispatches = DispatchGossip(
        redis, "m", "r0", "boot-0", print, lambda _: {}, lambda _: True, SlowClock(), pool=pool
    )
    dispatches.set_routers(EVERYBODY)
    task = asyncio.create_task(dispatches.run())
    async with patience(5):
        while not {"XADD", "XREAD", "XREVRANGE"} <= {command[0] for command in redis.commands}:
            await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    words = {word for command in redis.commands for word in command if str(word).startswith("m:")}
    assert words == {key}
