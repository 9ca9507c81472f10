"""The index reader under random schedules: after fresh snapshots the index equals the caches."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvmesh.prefix_index import events
from kvmesh.prefix_index.events import Batch
from kvmesh.redis_link import RedisUnavailable
from services.router.index import index_reader, local_index
from services.router.index.index_reader import IndexReader
from services.router.index.local_index import LocalPrefixIndex
from tests.patience import patience
from tests.unit.router.index.test_local_index import Cache, Tree, depth

NAMES = ("a", "b", "c", "d", "e")


class StepClock:
    """Advances by a millisecond at each reading."""

    def __init__(self) -> None:
        self.looked_s = 0.0

    def now_s(self) -> float:
        self.looked_s += 0.001
        return self.looked_s


class WildRedis:
    """A stream and snapshots in memory. Before each command, caches change and entries are lost, repeated and trimmed."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.break_total = 0
        self.tree = Tree(rng)
        self.caches = {name: Cache(name, rng, self.tree) for name in NAMES}
        self.stream: list[tuple[int, bytes]] = []
        self.snapshots: dict[str, bytes] = {}
        self.entry = 0
        self.is_wild = True
        for name in NAMES:
            self.write(name)

    def append(self, batch: Batch) -> None:
        self.entry += 1
        self.stream.append((self.entry, events.encode_batch(batch)))

    def write(self, name: str) -> None:
        """Write a snapshot and announce it in the stream at once, as the publisher does."""
        cache = self.caches[name]
        self.snapshots[name] = events.encode_snapshot(cache.snapshot(self.entry))
        self.append(cache.note())
        cache.told = cache.seq

    def disturb(self) -> None:
        rng, name = self.rng, self.rng.choice(NAMES)
        kind = rng.random()
        if kind < 0.55:
            batch = self.caches[name].step()
            if rng.random() < 0.95:
                self.append(batch)
            if rng.random() < 0.05:
                self.append(batch)
        elif kind < 0.70:
            self.write(name)
        elif kind < 0.74:
            self.caches[name].boot()
            if rng.random() < 0.5:
                self.write(name)
        elif kind < 0.76:
            del self.stream[: rng.randrange(len(self.stream) + 1)]
        elif kind < 0.78:
            self.snapshots.pop(name, None)
        elif kind < 0.80:
            self.snapshots[name] = self.snapshots.get(name, b"KVS1")[: rng.randrange(120)]
        elif kind < 0.82:
            self.break_total += 1
            raise RedisUnavailable("it is away")

    def dedicated(self) -> WildRedis:
        return self

    def close(self) -> None:
        pass

    async def execute(self, *command: Any) -> Any:
        await asyncio.sleep(0)
        if self.is_wild:
            self.disturb()
        return self.answer(command)

    async def pipeline(self, commands: Sequence[Any]) -> list[Any]:
        return [await self.execute(*command) for command in commands]

    def answer(self, command: Sequence[Any]) -> Any:
        if command[0] == "GETRANGE":
            return self.snapshots.get(command[1].rpartition(":")[2], b"")[command[2] : command[3] + 1]
        entries = [(b"%d-0" % number, {events.FIELD: data}) for number, data in self.stream]
        if command[0] == "XREVRANGE":
            return entries[-1:]
        count = command[command.index("COUNT") + 1]
        if command[0] == "XREAD":
            after = events.parse_stream_id(command[-1].encode())[0]
            found = [one for one in entries if events.parse_stream_id(one[0])[0] > after][:count]
            return [[b"m:kv", found]] if found else None
        start = events.parse_stream_id(command[2][1:].encode())[0]
        end = events.parse_stream_id(command[3].encode())[0]
        return [one for one in entries if start < events.parse_stream_id(one[0])[0] <= end][:count]


@pytest.mark.parametrize("seed", range(30))
async def test_after_fresh_snapshots_the_index_equals_the_caches(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of snapshots between events, losses, repeats, reboots, breaks and changes of replicas leave no trace."""
    monkeypatch.setattr(index_reader, "CHUNK_BYTES", 96)
    monkeypatch.setattr(index_reader, "READ_COUNT", 7)
    monkeypatch.setattr(index_reader, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(local_index, "SLICE_BLOCKS", 3)
    monkeypatch.setattr(index_reader, "SLICE_BLOCKS", 3)
    rng = random.Random(seed)
    redis, index = WildRedis(rng), LocalPrefixIndex(rng.choice((30, 10_000, 10_000)))
    reader = IndexReader(redis, "m", index, StepClock())  # type: ignore[arg-type]  # what it needs of a link
    reader.set_replicas(NAMES)
    task = asyncio.create_task(reader.run())
    for _ in range(60):
        for _ in range(rng.randrange(20)):
            await asyncio.sleep(0)
        if rng.random() < 0.2:
            reader.set_replicas(rng.sample(NAMES, rng.randrange(len(NAMES) + 1)))
        index.matched(redis.tree.request(rng))
        if rng.random() < 0.3:
            index.assert_consistent()
    reader.set_replicas(NAMES)
    redis.is_wild = False
    for name in NAMES:
        redis.append(redis.caches[name].step())
        redis.write(name)
        redis.append(redis.caches[name].step())
    async with patience(5):
        while index.needs_maintenance or not is_up_to_date(index, redis):
            await asyncio.sleep(0)
    index.assert_consistent()
    for _ in range(50):
        request = redis.tree.request(rng)
        found = index.matched(request)
        for name in NAMES:
            wanted = depth(request, set(redis.caches[name].held))
            assert found.get(name, 0) == wanted or (
                index.evicted_block_total and found.get(name, 0) < wanted
            ), f"{seed=} {name=}"
    task.cancel()
    await asyncio.wait([task])


def is_up_to_date(index: LocalPrefixIndex, redis: WildRedis) -> bool:
    return all(index.position_of(name) == (cache.epoch, cache.seq) for name, cache in redis.caches.items())
