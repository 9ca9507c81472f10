"""The publisher under random schedules: each snapshot is one moment of the cache, and the stream has the later events."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest

from kvmesh import blocks
from kvmesh.clock import VirtualClock
from kvmesh.metrics import Metrics
from kvmesh.prefix_index import block_log, events, publisher, telemetry
from kvmesh.prefix_index.block_log import PART_BLOCKS, BlockLog
from kvmesh.prefix_index.events import EventError, Snapshot
from kvmesh.prefix_index.publisher import FLUSH_ENTRIES_MAX, Publisher
from kvmesh.prefix_index.translation import EngineEventError
from kvmesh.redis_link import RedisUnavailable
from kvmesh.tasks import end
from services.router.index import index_reader
from services.router.index.index_reader import IndexReader
from services.router.index.local_index import LocalPrefixIndex
from tests.patience import patience
from tests.unit.prefix_index.test_translation import BLOCK, SALT, FakeEngine

STREAM, SNAPSHOT = "m:kv", "m:snap:p"


def read_snapshot(data: bytes) -> Snapshot:
    """Return the snapshot that Redis holds. Raises EventError."""
    head = events.decode_snapshot_head(data)
    if len(data) != head.size + 8 * head.block_count:
        raise EventError(f"{head.block_count} blocks, {len(data)} bytes")
    return Snapshot(head.replica, head.epoch, head.seq, head.stream_id, data[head.size :])


class MemoryRedis:
    """The commands of publisher and reader, on a dict and a list. `before` runs before each, `on_snapshot` after each
    snapshot."""

    def __init__(self) -> None:
        self.break_total = 0
        self.keys: dict[str, bytes] = {}
        self.stream: list[tuple[int, bytes]] = []
        self.entry = 0
        self.before: Callable[[], None] = lambda: None
        self.on_snapshot: Callable[[], None] = lambda: None
        self.written: list[int] = []
        """Bytes of each round trip of the publisher."""
        self.commands: list[int] = []
        """Number of commands in each."""

    def dedicated(self) -> MemoryRedis:
        return self

    def close(self) -> None:
        pass

    async def execute(self, *command: Any) -> Any:
        await asyncio.sleep(0)
        self.before()
        return self.answer(command)

    async def pipeline(self, commands: Sequence[Any], *, atomic: bool = False) -> list[Any]:
        self.written.append(
            sum(len(one) for command in commands for one in command if isinstance(one, bytes))
        )
        self.commands.append(len(commands))
        await asyncio.sleep(0)
        answers = []
        for index, command in enumerate(commands):
            if not (atomic and index):
                self.before()
            answers.append(self.answer(command))
        return answers

    def answer(self, command: Sequence[Any]) -> Any:
        name, key = command[0], command[1]
        if name in ("SET", "APPEND"):
            self.keys[key] = command[2] if name == "SET" else self.keys.get(key, b"") + command[2]
            answer = len(self.keys[key])
        elif name == "RENAME":
            if key not in self.keys:
                raise RedisUnavailable("no such key", is_transient=False)
            key = command[2]
            self.keys[key] = self.keys.pop(command[1])
            answer = 1
        elif name == "GETRANGE":
            return self.keys.get(key, b"")[command[2] : command[3] + 1]
        elif name == "XADD":
            self.entry += 1
            self.stream.append((self.entry, command[-1]))
            return b"%d-0" % self.entry
        elif name == "EXPIRE":
            return int(key in self.keys)
        else:
            return self.entries(command)
        if key == SNAPSHOT:
            self.on_snapshot()
        return answer

    def entries(self, command: Sequence[Any]) -> Any:
        found = [(b"%d-0" % number, {events.FIELD: data}) for number, data in self.stream]
        if command[0] == "XREVRANGE":
            return found[-1:]
        count = command[command.index("COUNT") + 1]
        first = command[-1] if command[0] == "XREAD" else command[2][1:]
        last = f"{self.entry}-0" if command[0] == "XREAD" else command[3]
        after, end = (events.parse_stream_id(one.encode())[0] for one in (first, last))
        found = [one for one in found if after < events.parse_stream_id(one[0])[0] <= end][:count]
        return ([[STREAM, found]] if found else None) if command[0] == "XREAD" else found


class StepClock:
    """Advances by a millisecond at each reading."""

    def __init__(self) -> None:
        self.looked_s = 0.0

    def now_s(self) -> float:
        self.looked_s += 0.001
        return self.looked_s


class World:
    """An engine that advances with each command to Redis, and its content after each of its events."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.redis = MemoryRedis()
        self.redis.before, self.redis.on_snapshot = self.disturb, self.check_snapshot
        self.publisher = self.publish()
        self.is_wild = True
        self.snapshots = self.moved_on = 0
        self.wrong: list[str] = []
        self.held: dict[tuple[str, int], set[int]] = {}
        self.boot()

    def publish(self) -> Publisher:
        redis: Any = self.redis
        return Publisher(redis, "m", "p", BLOCK, SALT, snapshot_interval_s=0.05, clock=StepClock())

    def boot(self) -> None:
        self.engine = FakeEngine(self.rng, f"boot-{self.rng.getrandbits(32)}")
        self.hashes: dict[int, int] = {}
        self.subscribe()

    def subscribe(self) -> None:
        self.note()
        self.publisher.on_engine_message(self.engine.snapshot())

    def note(self) -> None:
        self.held[self.engine.boot_id, self.engine.event_id] = self.content()

    def content(self) -> set[int]:
        for value, (parent, tokens) in self.engine.blocks.items():
            if value not in self.hashes:
                root = blocks.root_hash(SALT) if parent is None else self.hashes[parent]
                self.hashes[value] = blocks.child_hash(root, struct.pack(f"<{BLOCK}i", *tokens))
        return {self.hashes[value] for value in self.engine.blocks}

    def step(self) -> None:
        message = self.engine.step()
        self.note()
        try:
            self.publisher.on_engine_message(message)
        except EngineEventError:
            self.subscribe()

    def disturb(self) -> None:
        if not self.is_wild:
            return
        kind = self.rng.random()
        if kind < 0.7:
            self.step()
        elif kind < 0.72:
            self.engine.step()  # lost on the way
        elif kind < 0.74:
            self.boot()
        elif kind < 0.76:
            self.redis.keys.clear()
        elif kind < 0.78:
            self.redis.break_total += 1
            raise RedisUnavailable("it is away")

    def check_snapshot(self) -> None:
        try:
            snapshot = read_snapshot(self.redis.keys[SNAPSHOT])
        except EventError as error:
            self.wrong.append(str(error))
            return
        moment, hashes = (snapshot.epoch, snapshot.seq), blocks.unpack(snapshot.packed)
        if moment not in self.held or len(set(hashes)) != len(hashes) or set(hashes) != self.held[moment]:
            self.wrong.append(f"{moment} has {len(hashes)} blocks")
        self.snapshots += 1
        self.moved_on += moment != (self.engine.boot_id, self.engine.event_id)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of three blocks, and a buffer that overflows."""
    monkeypatch.setattr(block_log, "PART_BLOCKS", 3)
    monkeypatch.setattr(publisher, "PART_BLOCKS", 3)
    monkeypatch.setattr(publisher, "FLUSH_S", 0.0)
    monkeypatch.setattr(publisher, "FLUSH_ENTRIES_MAX", 2)
    monkeypatch.setattr(publisher, "BUFFER_BLOCKS_MAX", 40)
    monkeypatch.setattr(publisher, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(index_reader, "CHUNK_BYTES", 96)
    monkeypatch.setattr(index_reader, "READ_COUNT", 7)
    monkeypatch.setattr(index_reader, "RETRY_PAUSE_S", 0.0)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("seed", range(20))
async def test_a_snapshot_is_one_moment_and_the_stream_tells_the_rest(seed: int) -> None:
    """Blocks come and go between the parts; messages, parts and Redis are lost; publishers end and start."""
    world = World(seed)
    local_index = LocalPrefixIndex()
    redis: Any = world.redis
    reader = IndexReader(redis, "m", local_index, StepClock())
    reader.set_replicas(["p"])
    reading = asyncio.create_task(reader.run())
    running = asyncio.create_task(world.publisher.run())
    try:
        for _ in range(4):
            for _ in range(world.rng.randrange(400)):
                await asyncio.sleep(0)
            if world.rng.random() < 0.3:
                running.cancel()
                await asyncio.wait([running])
                await world.publisher.close()
                world.publisher = world.publish()
                world.subscribe()
                running = asyncio.create_task(world.publisher.run())
        world.is_wild = False
        for _ in range(30):
            world.step()
            for _ in range(world.rng.randrange(10)):
                await asyncio.sleep(0)
        wanted = world.content()
        async with patience(10):
            while local_index.blocks_of("p") != len(wanted) or not all(
                local_index.matched([one]) for one in wanted
            ):
                await asyncio.sleep(0)
        assert world.snapshots > 3 and world.moved_on and not world.wrong
        local_index.assert_consistent()
        assert all(events.decode_batch(data) for _, data in world.redis.stream)
    finally:
        running.cancel()
        reading.cancel()
        ended, _ = await asyncio.wait([running, reading])
    assert all(one.cancelled() for one in ended)


def chain(count: int, boot_id: str = "boot") -> dict[str, Any]:
    """Return an engine's snapshot of a chain of `count` blocks."""
    stored = [{"block_hash": index, "tokens": [index] * BLOCK} for index in range(count)]
    return {
        "boot_id": boot_id,
        "event_id": 0,
        "snapshot": [{"type": "stored", "parent_hash": None, "blocks": stored}],
    }


async def test_of_two_publishers_with_one_name_only_the_holder_is_heard() -> None:
    """While one publisher is mute, the router's copy is the cache of the other; afterwards it is its own again."""
    one, two = World(1), World(2)
    two.redis = one.redis
    for world in (one, two):
        world.is_wild = False
        redis: Any = one.redis
        world.publisher = Publisher(redis, "m", "p", BLOCK, SALT, snapshot_interval_s=1e6, clock=StepClock())
        world.subscribe()
    one.redis.before = one.redis.on_snapshot = lambda: None
    reader = IndexReader(redis, "m", local_index := LocalPrefixIndex(), StepClock())
    reader.set_replicas(["p"])
    tasks = [asyncio.create_task(part.run()) for part in (one.publisher, two.publisher, reader)]
    try:
        for holder, other in ((two, one), (one, two), (two, one)):
            other.publisher.mute()
            holder.publisher.unmute()
            for _ in range(20):
                for world in (one, two):
                    world.step()
                await asyncio.sleep(0)
            async with patience(10):
                while local_index.blocks_of("p") != len(holder.content()) or not all(
                    local_index.matched([each]) for each in holder.content()
                ):
                    await asyncio.sleep(0)
            assert local_index.position_of("p")[0] == holder.engine.boot_id
    finally:
        await end(tasks)


@pytest.mark.parametrize("gaps", [False, True])
async def test_no_turn_of_the_loop_takes_more_than_a_part(
    gaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large cache is read a part per turn, and no message to Redis is longer than two parts."""
    count = 6 * PART_BLOCKS + 5
    redis = MemoryRedis()
    link: Any = redis
    one = Publisher(link, "m", "p", BLOCK, SALT, clock=VirtualClock())
    one.on_engine_message(chain(count))
    if gaps:
        gone = [index for index in range(count) if index % 16 > 7]
        data = {"type": "removed", "block_hashes": gone}
        one.on_engine_message({"boot_id": "boot", "events": [{"event_id": 1, "data": data}]})
        await one.close()
        redis.written.clear()
    turns: list[int] = []
    turn = 0
    parts = BlockLog._parts

    def counted(log: BlockLog) -> Iterator[bytes]:
        for part in parts(log):
            turns.append(turn)
            yield part

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(BlockLog, "_parts", counted)
    task = asyncio.create_task(count_turns())
    await asyncio.sleep(0)
    await one.close()
    task.cancel()
    snapshot = read_snapshot(redis.keys[SNAPSHOT])
    assert snapshot.block_count == one.block_count == (count - len(gone) if gaps else count)
    assert len(turns) == 7
    assert all(after > before for before, after in pairwise(turns))
    assert max(redis.written) <= 2 * 8 * PART_BLOCKS


async def test_events_do_not_wait_for_a_large_snapshot() -> None:
    """Events during the writing are in the stream before the snapshot is there, and behind the entry that it names."""
    redis = MemoryRedis()
    link: Any = redis
    one = Publisher(link, "m", "p", BLOCK, SALT, clock=VirtualClock())
    one.on_engine_message(chain(8 * PART_BLOCKS))
    await one.close()
    told, event_id = list[int](), 0

    def tell() -> None:
        nonlocal event_id
        if SNAPSHOT in redis.keys and len(redis.stream) < 6:
            event_id += 1
            data = {"type": "removed", "block_hashes": [8 * PART_BLOCKS - event_id]}
            one.on_engine_message({"boot_id": "boot", "events": [{"event_id": event_id, "data": data}]})

    redis.before = tell
    redis.on_snapshot = lambda: told.append(len(redis.stream))
    await one.close()
    head = events.decode_snapshot_head(redis.keys[SNAPSHOT])
    assert (head.seq, head.block_count) == (1, 8 * PART_BLOCKS - 1)
    assert head.stream_id == (1, 0)
    assert len(told) == 1 and told[0] >= 6
    batches = [events.decode_batch(data) for _, data in redis.stream[1:]]
    assert [batch.after for batch in batches] == [0, *(batch.seq for batch in batches[:-1])]
    assert batches[-1].block_count == one.block_count == 8 * PART_BLOCKS - event_id


async def test_events_behind_dropped_ones_wait_for_the_snapshot() -> None:
    """Readers that detect the gap find a useful snapshot at once."""
    redis = MemoryRedis()
    link: Any = redis
    one = Publisher(link, "m", "p", BLOCK, SALT, clock=VirtualClock())
    one.on_engine_message(chain(4 * PART_BLOCKS))
    event_id = 0

    def tell() -> None:
        nonlocal event_id
        if event_id < 8:
            event_id += 1
            data = {"type": "removed", "block_hashes": [4 * PART_BLOCKS - event_id]}
            one.on_engine_message({"boot_id": "boot", "events": [{"event_id": event_id, "data": data}]})
        assert SNAPSHOT in redis.keys or not redis.stream

    redis.before = tell
    await one.close()
    assert one.snapshot_total == 1
    assert event_id == 8 and len(redis.stream) > 4


@pytest.mark.parametrize("is_snapshot", [False, True])
async def test_a_backlog_after_a_slow_redis_is_sent_in_parts(is_snapshot: bool) -> None:
    """Thousands of events, or some with many blocks, are not one message. After the last one the index is up to date."""
    redis, clock = MemoryRedis(), VirtualClock()
    link: Any = redis
    one = Publisher(link, "m", "p", BLOCK, SALT, clock=clock)
    one.on_engine_message(chain(40_000))
    await one.close()
    redis.written.clear()
    redis.commands.clear()
    gone = list(range(39_999, -1, -1))
    for event_id, count in enumerate([1] * 3000 + [7000] * 5, 1):
        taken, gone = gone[:count], gone[count:]
        data = {"type": "removed", "block_hashes": taken}
        one.on_engine_message({"boot_id": "boot", "events": [{"event_id": event_id, "data": data}]})
    if is_snapshot:
        await one.close()
    else:
        task = asyncio.create_task(one.run())
        async with patience(5):
            while len(redis.stream) < 3006:
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    assert max(redis.commands) <= FLUSH_ENTRIES_MAX + 3
    assert max(redis.written) <= 2 * 8 * PART_BLOCKS
    batches = [events.decode_batch(data) for _, data in redis.stream[1:]]
    assert [batch.after for batch in batches[:3005]] == list(range(3005))
    assert one.dropped_block_total == 0
    if is_snapshot:
        assert batches[-1].block_count == one.block_count == 2000


async def test_a_snapshot_is_given_up_when_its_engine_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    """A message is lost while the last events before it are sent: the previous snapshot stays."""
    redis = MemoryRedis()
    link: Any = redis
    one = Publisher(link, "m", "p", BLOCK, SALT, clock=VirtualClock())
    one.on_engine_message(chain(2000))
    await one.close()
    for event_id in range(1, 1001):
        data = {"type": "removed", "block_hashes": [event_id]}
        one.on_engine_message({"boot_id": "boot", "events": [{"event_id": event_id, "data": data}]})

    def miss() -> None:
        if len(redis.stream) == FLUSH_ENTRIES_MAX // 2:
            with suppress(EngineEventError):
                one.on_engine_message({"boot_id": "another", "events": []})

    redis.before = miss
    await one.close()
    assert one.snapshot_total == 1
    assert events.decode_snapshot_head(redis.keys[SNAPSHOT]).block_count == 2000
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_metrics_count_published_blocks_and_snapshots() -> None:
    """Blocks published as events, snapshots, and blocks replaced by a snapshot."""
    link: Any = MemoryRedis()
    one = Publisher(link, "m", "p", BLOCK, SALT, clock=VirtualClock())
    metrics = Metrics("prefill")
    telemetry.export(one, metrics)
    one.on_engine_message(chain(10))
    await one.close()
    for event_id, count in enumerate((3, 2), 1):
        data = {"type": "removed", "block_hashes": list(range(3 * event_id, 3 * event_id + count))}
        one.on_engine_message({"boot_id": "boot", "events": [{"event_id": event_id, "data": data}]})
        if event_id == 1:
            await one.close()
    with suppress(EngineEventError):
        one.on_engine_message({"boot_id": "another", "events": []})
    samples = {sample.name: sample.value for family in metrics.collect() for sample in family.samples}
    assert samples == {
        "kvmesh_prefill_index_published_blocks_total": 3,
        "kvmesh_prefill_index_snapshots_total": 2,
        "kvmesh_prefill_index_blocks": 5,
        "kvmesh_prefill_index_dropped_blocks_total": 2,
    }
