"""The reader of the index yields to the event loop, and forgets replicas that are not followed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvmesh import blocks
from kvmesh.prefix_index import events
from kvmesh.prefix_index.events import Batch, Op, Snapshot
from kvmesh.redis_link import RedisUnavailable
from services.router.cooperative_yield import SLICE_S
from services.router.index.index_reader import CHUNK_BYTES, READ_COUNT, IndexReader
from services.router.index.local_index import SLICE_BLOCKS, LocalPrefixIndex
from tests.patience import patience
from tests.unit.prefix_index.test_publisher import MemoryRedis


class SlowClock:
    """Each reading of the clock costs a millisecond, as if every batch did."""

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

    def dedicated(self) -> StoredRedis:
        return self

    def close(self) -> None:
        pass

    async def execute(self, *command: Any) -> Any:
        if command[0] == "GETRANGE":
            return self.snapshot[command[2] : command[3] + 1]
        if command[0] == "XREVRANGE":
            return self.entries[-1:]
        if command[0] == "XRANGE":
            return self.entries
        await asyncio.sleep(0)
        return []

    async def pipeline(self, commands: Any) -> list[Any]:
        return [await self.execute(*command) for command in commands]


async def follow(redis: StoredRedis, local_index: LocalPrefixIndex) -> tuple[IndexReader, asyncio.Task[None]]:
    reader = IndexReader(redis, "m", local_index, SlowClock())  # type: ignore[arg-type]  # what it needs of a link
    reader.set_replicas(["p"])
    return reader, asyncio.create_task(reader.run())


async def caught_up(reader: IndexReader) -> int:
    """Return how often the loop ran until `reader` had caught up."""
    turns = 0
    async with patience(5):
        while not reader.is_caught_up:
            await asyncio.sleep(0)
            turns += 1
    return turns


async def kept_up(local_index: LocalPrefixIndex) -> None:
    """Return when the reader has no maintenance left to do."""
    async with patience(5):
        while local_index.needs_maintenance:
            await asyncio.sleep(0)


async def test_a_replay_is_cut_into_slices() -> None:
    """A page of batches that costs 255 ms is not applied in one turn of the loop."""
    local_index = LocalPrefixIndex()
    reader, task = await follow(StoredRedis(), local_index)
    turns = await caught_up(reader)
    assert local_index.block_count == READ_COUNT - 1
    assert turns >= (READ_COUNT - 1) * 0.001 / (2 * SLICE_S)
    task.cancel()
    await asyncio.wait([task])


async def test_a_replica_that_comes_back_while_it_is_loaded_is_loaded_again() -> None:
    """The blocks read for the replica's previous process do not count for it. A replica that left delays no load."""
    local_index, redis = LocalPrefixIndex(), StoredRedis()
    reader, task = await follow(redis, local_index)
    async with patience(5):
        while local_index.blocks_of("p") < READ_COUNT // 2:
            await asyncio.sleep(0)
    reader.set_replicas([])
    reader.set_replicas(["p"])
    assert local_index.blocks_of("p") == 0 and not reader.is_caught_up
    await caught_up(reader)
    assert reader.reload_total == 2 and local_index.blocks_of("p") == READ_COUNT - 1
    async with patience(5):
        reader.set_replicas([])
        reader.set_replicas(["p"])
        while local_index.blocks_of("p") < READ_COUNT // 2:
            await asyncio.sleep(0)
    reader.set_replicas([])
    async with patience(5):
        while local_index.block_count:
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


class RewrittenRedis(StoredRedis):
    """Rewrites the snapshot with other content before every second part of it is read."""

    def __init__(self, block_count: int) -> None:
        super().__init__()
        self.entries = []
        self.block_count = block_count
        self.written = self.parts = 0
        self.rewrites_left = 10**9
        self.write()

    def write(self) -> None:
        self.written += 1
        hashes = tuple(self.written << 60 | index << 30 for index in range(self.block_count))
        self.snapshot = events.encode_snapshot(Snapshot("p", "e", 0, (self.written, 0), blocks.pack(hashes)))

    async def pipeline(self, commands: Any) -> list[Any]:
        self.parts += 1
        if self.parts % 2 == 0 and self.rewrites_left:
            self.rewrites_left -= 1
            self.write()
        return await super().pipeline(commands)


@pytest.mark.parametrize(("rewrites", "reads_whole"), [(0, False), (1, False), (10**9, True)])
async def test_a_snapshot_read_in_parts_is_never_a_mixture(rewrites: int, reads_whole: bool) -> None:
    """A snapshot that is rewritten meanwhile is read again, and whole if the rewriting does not stop."""
    block_count = 3 * CHUNK_BYTES // 8 + 5
    local_index, redis = LocalPrefixIndex(), RewrittenRedis(block_count)
    redis.rewrites_left = rewrites
    reader, task = await follow(redis, local_index)
    await caught_up(reader)
    await kept_up(local_index)
    assert local_index.blocks_of("p") == local_index.block_count == block_count
    assert all(
        local_index.matched([redis.written << 60 | index << 30]) for index in range(0, block_count, 997)
    )
    assert (redis.written > 2) is reads_whole
    local_index.assert_consistent()
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("change", ["cut", "longer", "foreign"])
async def test_a_damaged_snapshot_leaves_what_was_known(change: str) -> None:
    """A snapshot that breaks the promise of its head changes nothing, and is counted."""
    local_index, redis = LocalPrefixIndex(), RewrittenRedis(CHUNK_BYTES // 8 + 100)
    redis.rewrites_left = 0
    if change == "cut":
        redis.snapshot = redis.snapshot[:-11]
    elif change == "longer":
        redis.snapshot += b"12345678"
    else:
        redis.snapshot = b"KVS2" + redis.snapshot[4:]
    local_index.add("p")
    list(local_index.load(Snapshot("p", "e", 0, (0, 0), blocks.pack((7, 8)))))
    reader, task = await follow(redis, local_index)
    await caught_up(reader)
    task.cancel()
    await asyncio.wait([task])
    assert reader.unreadable_total >= 1 and reader.reload_total == 0
    assert local_index.matched([7, 8]) == {"p": 2}
    list(local_index.maintain())
    assert local_index.block_count == 2
    local_index.assert_consistent()


class AwayRedis(StoredRedis):
    """Never answers."""

    async def execute(self, *command: Any) -> Any:
        raise RedisUnavailable("it is away")


async def test_the_index_is_maintained_while_redis_is_unavailable() -> None:
    """Ended in-flight blocks are removed all the same."""
    local_index, many = LocalPrefixIndex(), tuple(range(100_000))
    _, task = await follow(AwayRedis(), local_index)
    local_index.add_in_flight("p", many)
    local_index.remove_in_flight_later("p", many)
    await kept_up(local_index)
    assert not local_index.in_flight_block_count
    task.cancel()
    await asyncio.wait([task])


async def test_a_batch_of_many_blocks_is_cut_into_slices() -> None:
    """An entry of 60,000 blocks leaves turns to the event loop, whether it is replayed or new."""
    many = tuple(index << 40 for index in range(60_000))
    local_index, redis = LocalPrefixIndex(), StoredRedis()
    redis.entries = [(b"5-1", {events.FIELD: events.encode_batch(Batch("p", "e", 0, 1, Op.STORED, many))})]
    reader, task = await follow(redis, local_index)
    turns = await caught_up(reader)
    assert local_index.block_count == len(many)
    assert turns >= len(many) / SLICE_BLOCKS * 0.001 / (2 * SLICE_S)
    task.cancel()
    await asyncio.wait([task])


async def test_a_full_index_stays_within_its_bound_while_it_loads() -> None:
    """A snapshot of many times the bound never makes the index much larger than the bound."""
    local_index, redis = LocalPrefixIndex(20_000), RewrittenRedis(CHUNK_BYTES // 8 * 3)
    redis.rewrites_left = 0
    reader, task = await follow(redis, local_index)
    most = 0
    async with patience(20):
        while not reader.is_caught_up or local_index.needs_maintenance:
            await asyncio.sleep(0)
            most = max(most, local_index.block_count)
    assert most <= 20_000 * 17 // 16 + CHUNK_BYTES // 8
    assert 10_000 <= local_index.block_count <= 20_000
    local_index.assert_consistent()
    task.cancel()
    await asyncio.wait([task])


class TalkingRedis(MemoryRedis):
    """Publishes a block of "b" with each command, and records how many of them the index has."""

    def __init__(self, local_index: LocalPrefixIndex) -> None:
        super().__init__()
        self.local_index = local_index
        self.seq = 0
        self.seen: list[tuple[str, int]] = []
        """Command, and the number of blocks that the index is behind."""

    def store(self, name: str, block_count: int, numbered: int) -> None:
        """Write a snapshot of `block_count` blocks."""
        hashes = tuple(numbered << 52 | index << 30 for index in range(block_count))
        stored = Snapshot(name, "e", 0, (self.entry, 0), blocks.pack(hashes))
        self.keys[f"m:snap:{name}"] = events.encode_snapshot(stored)

    def tell(self, batch: Batch) -> None:
        """Append to the stream."""
        self.answer(("XADD", "m:kv", "*", events.FIELD, events.encode_batch(batch)))

    def answer(self, command: Any) -> Any:
        if command[0] in ("GETRANGE", "XRANGE"):
            self.seen.append((command[0], self.seq - self.local_index.blocks_of("b")))
            self.seq += 1
            self.tell(Batch("b", "e", self.seq - 1, self.seq, Op.STORED, (1 << 63 | self.seq,)))
        return super().answer(command)


async def reloaded(redis: TalkingRedis, *names: str) -> None:
    """Load `names`, and then "a" again, which has missed events."""
    link: Any = redis
    reader = IndexReader(link, "m", redis.local_index, SlowClock())
    reader.set_replicas(names)
    task = asyncio.create_task(reader.run())
    await caught_up(reader)
    redis.seen.clear()
    reload_total = reader.reload_total
    head = events.encode_snapshot_head("a", "e", 6, (0, 0), redis.local_index.blocks_of("a"))
    redis.keys["m:snap:a"] = head + redis.keys["m:snap:a"][len(head) :]
    redis.tell(Batch("a", "e", 5, 6, Op.STORED, (3,)))
    async with patience(5):
        while reader.reload_total == reload_total or "a" in reader._to_load:
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert redis.local_index.position_of("a") == ("e", 6)
    redis.local_index.assert_consistent()


async def test_events_of_others_do_not_wait_for_a_snapshot() -> None:
    """While a large snapshot is loaded, the index is at most a few commands behind with another replica."""
    redis = TalkingRedis(LocalPrefixIndex())
    redis.store("a", CHUNK_BYTES // 8 * 12, 1)
    redis.store("b", 0, 2)
    await reloaded(redis, "a", "b")
    lags = [lag for name, lag in redis.seen if name == "GETRANGE"]
    assert len(lags) > 24
    assert max(lags) <= 6


async def test_events_of_others_do_not_wait_for_a_replay() -> None:
    """While a replica's events are searched in a long stream, events of another replica are applied."""
    redis = TalkingRedis(LocalPrefixIndex())
    redis.store("a", 1, 1)
    redis.store("b", 0, 2)
    for seq in range(1, 12 * READ_COUNT):
        redis.tell(Batch("c", "e", seq, seq + 1, Op.STORED, (seq,)))
    await reloaded(redis, "a", "b")
    lags = [lag for name, lag in redis.seen if name == "XRANGE"]
    assert len(lags) > 12
    assert max(lags) <= 3


async def test_a_loaded_replica_does_not_wait_for_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among many replicas that load, the first follow the stream before the last are loaded."""
    monkeypatch.setattr("services.router.index.index_reader.LOAD_ROUND_S", 0.05)
    redis = TalkingRedis(LocalPrefixIndex())
    names = [f"r{index:02}" for index in range(30)]
    for index, name in enumerate(["b", *names]):
        redis.store(name, 2000, index)
    link: Any = redis
    reader = IndexReader(link, "m", redis.local_index, SlowClock())
    reader.set_replicas(["b", *names])
    task = asyncio.create_task(reader.run())
    lags = []
    async with patience(10):
        while reader.reload_total < len(names):
            await asyncio.sleep(0)
            lags.append(redis.seq - max(0, redis.local_index.blocks_of("b") - 2000))
        while not reader.is_caught_up:
            await asyncio.sleep(0)
    assert min(lags[len(lags) // 2 :]) < 10
    assert reader.reload_total == len(names) + 1
    assert redis.local_index.blocks_of("b") > 2000
    task.cancel()
    await asyncio.wait([task])


async def test_a_useless_snapshot_does_not_delay_the_loads_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The replica that has waited longest is loaded first, not the one that failed last."""
    monkeypatch.setattr("services.router.index.index_reader.LOAD_ROUND_S", 0.0)
    monkeypatch.setattr("services.router.index.index_reader.RELOAD_PAUSE_S", 0.0)
    redis = TalkingRedis(LocalPrefixIndex())
    redis.store("a", CHUNK_BYTES // 8 * 3, 1)
    redis.keys["m:snap:a"] = redis.keys["m:snap:a"][:-1]
    for name in ("b", "c"):
        redis.store(name, 5, 2)
    link: Any = redis
    reader = IndexReader(link, "m", redis.local_index, SlowClock())
    reader.set_replicas(["a", "b", "c"])
    task = asyncio.create_task(reader.run())
    async with patience(5):
        while not (reader.unreadable_total > 2 and redis.local_index.blocks_of("c")):
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


async def test_no_snapshot_is_sought_of_an_engine_without_events() -> None:
    """A replica with believed blocks has no snapshot: none is read, and the reader has caught up without it."""
    local_index, redis = LocalPrefixIndex(), StoredRedis()
    local_index.add("p")
    local_index.believe("p", 100, "boot")
    reads: list[Any] = []
    execute = redis.execute

    async def counted(*command: Any) -> Any:
        reads.append(command[0])
        return await execute(*command)

    redis.execute = counted  # type: ignore[method-assign]
    reader, task = await follow(redis, local_index)
    await caught_up(reader)
    async with patience(5):
        while reads.count("XREAD") < 3:
            await asyncio.sleep(0)
    assert "GETRANGE" not in reads and reader.reload_total == 0
    assert local_index.block_count == 0 and local_index.is_believed("p")
    task.cancel()
