"""The reader of the index lets the event loop breathe, and forgets what nobody wants."""

from __future__ import annotations

import asyncio
from typing import Any

from kvmesh.prefix_index import events
from kvmesh.prefix_index.events import Batch, Op, Snapshot
from services.router.index_reader import READ_COUNT, SLICE_S, IndexReader
from services.router.mirror import PrefixMirror


class SlowClock:
    """Each look costs a millisecond, as if every batch did."""

    def __init__(self) -> None:
        self.looked_s = 0.0

    def now_s(self) -> float:
        self.looked_s += 0.001
        return self.looked_s


class StoredRedis:
    """A Redis that holds one snapshot and one page of the stream behind it."""

    break_total = 0

    def __init__(self) -> None:
        self.snapshot = events.encode_snapshot(Snapshot("p", "e", 0, (4, 0), b""))
        self.entries = [
            (
                b"5-%d" % (index + 1),
                {events.FIELD: events.encode_batch(Batch("p", "e", index, index + 1, Op.STORED, (index,)))},
            )
            for index in range(READ_COUNT - 1)
        ]

    async def execute(self, *command: Any) -> Any:
        if command[0] == "GET":
            return self.snapshot
        if command[0] == "XREVRANGE":
            return self.entries[-1:]
        if command[0] == "XRANGE":
            return self.entries
        await asyncio.sleep(0)
        return []


async def follow(redis: StoredRedis, mirror: PrefixMirror) -> tuple[IndexReader, asyncio.Task[None]]:
    reader = IndexReader(redis, "m", mirror, SlowClock())  # type: ignore[arg-type]  # what it needs of a link
    reader.set_replicas(["p"])
    return reader, asyncio.create_task(reader.run())


async def caught_up(reader: IndexReader) -> int:
    """Return how often the loop ran until `reader` had caught up."""
    turns = 0
    async with asyncio.timeout(5):
        while not reader.is_caught_up:
            await asyncio.sleep(0)
            turns += 1
    return turns


async def test_a_replay_is_cut_into_slices() -> None:
    """A page of batches that costs 255 ms is not taken in one turn of the loop."""
    mirror = PrefixMirror()
    reader, task = await follow(StoredRedis(), mirror)
    turns = await caught_up(reader)
    assert mirror.block_count == READ_COUNT - 1
    assert turns >= (READ_COUNT - 1) * 0.001 / (2 * SLICE_S)
    task.cancel()
    await asyncio.wait([task])


async def test_a_replica_that_comes_back_while_it_is_loaded_is_loaded_again() -> None:
    """What was read for its predecessor does not count for it, and one that left is not waited for."""
    mirror, redis = PrefixMirror(), StoredRedis()
    reader, task = await follow(redis, mirror)
    async with asyncio.timeout(5):
        while mirror.blocks_of("p") < READ_COUNT // 2:
            await asyncio.sleep(0)
    reader.set_replicas([])
    reader.set_replicas(["p"])
    assert mirror.blocks_of("p") == 0 and not reader.is_caught_up
    await caught_up(reader)
    assert reader.reload_total == 2 and mirror.blocks_of("p") == READ_COUNT - 1
    async with asyncio.timeout(5):
        reader.set_replicas([])
        reader.set_replicas(["p"])
        while mirror.blocks_of("p") < READ_COUNT // 2:
            await asyncio.sleep(0)
    reader.set_replicas([])
    for _ in range(1000):
        await asyncio.sleep(0)
    assert mirror.block_count == 0
    task.cancel()
    await asyncio.wait([task])
