"""The prefix index, from an engine's events to the router's local replica, over a Redis that is trimmed, stopped and
emptied.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from kvmesh import blocks
from kvmesh.prefix_index import events
from kvmesh.prefix_index.publisher import Publisher
from kvmesh.redis_link import RedisLink
from services.router.index.index_reader import IndexReader
from services.router.index.local_index import LocalPrefixIndex
from tests.patience import patience

BLOCK = 4
SALT = "m"


class Engine:
    """Publishes events of chains of blocks, and tracks the blocks that it holds."""

    def __init__(self, seed: int, boot_id: str = "boot") -> None:
        self.rng = random.Random(seed)
        self.boot_id = boot_id
        self.event_id = 0
        self.chains: list[list[int]] = []
        self.stored: dict[int, int] = {}

    def snapshot(self) -> dict[str, Any]:
        data = [self._stored(chain) for chain in self.chains]
        return {"boot_id": self.boot_id, "event_id": self.event_id, "snapshot": data}

    def store(self, count: int = 3) -> dict[str, Any]:
        chain = [self.rng.randrange(1000) for _ in range(BLOCK * count)]
        self.chains.append(chain)
        return self._message(self._stored(chain))

    def remove_last(self) -> dict[str, Any]:
        chain = self.chains.pop()
        return self._message({"type": "removed", "block_hashes": self._engine_hashes(chain)[::-1]})

    def hashes(self, chain: list[int]) -> list[int]:
        return blocks.chain(b"".join(value.to_bytes(4, "little") for value in chain), BLOCK, SALT)

    def _engine_hashes(self, chain: list[int]) -> list[int]:
        return [value ^ 0xFFFF for value in self.hashes(chain)]

    def _stored(self, chain: list[int]) -> dict[str, Any]:
        parts = [chain[at : at + BLOCK] for at in range(0, len(chain), BLOCK)]
        pairs = zip(self._engine_hashes(chain), parts, strict=True)
        return {
            "type": "stored",
            "parent_hash": None,
            "blocks": [{"block_hash": value, "tokens": tokens} for value, tokens in pairs],
        }

    def _message(self, data: dict[str, Any]) -> dict[str, Any]:
        self.event_id += 1
        return {"boot_id": self.boot_id, "events": [{"event_id": self.event_id, "data": data}]}


class Mesh:
    """One Redis, some publishers, one reader."""

    def __init__(self, server: Any, interval_s: float = 30.0) -> None:
        self.server = server
        self.interval_s = interval_s
        self.link, self.reader_link = RedisLink(server.url), RedisLink(server.url)
        self.local_index = LocalPrefixIndex()
        self.reader = IndexReader(self.reader_link, "m", self.local_index)
        self.publishers: dict[str, Publisher] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def publish(self, name: str, engine: Engine) -> Publisher:
        publisher = Publisher(self.link, "m", name, BLOCK, SALT, snapshot_interval_s=self.interval_s)
        publisher.on_engine_message(engine.snapshot())
        self.publishers[name] = publisher
        self.tasks[name] = asyncio.create_task(publisher.run())
        return publisher

    def read(self, *names: str) -> None:
        self.reader.set_replicas(names)
        if "reader" not in self.tasks:
            self.tasks["reader"] = asyncio.create_task(self.reader.run())

    async def stop(self, name: str) -> None:
        task = self.tasks.pop(name)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    def agrees(self, name: str, engine: Engine) -> bool:
        wanted = {value for chain in engine.chains for value in engine.hashes(chain)}
        if self.local_index.blocks_of(name) != len(wanted):
            return False
        return all(
            self.local_index.matched(engine.hashes(chain)).get(name, 0) == len(chain) // BLOCK
            for chain in engine.chains
        )

    async def close(self) -> None:
        for name in list(self.tasks):
            await self.stop(name)
        await self.link.close()
        await self.reader_link.close()


@asynccontextmanager
async def mesh_on(server: Any, interval_s: float = 30.0) -> AsyncIterator[Mesh]:
    mesh = Mesh(server, interval_s)
    try:
        yield mesh
    finally:
        await mesh.close()


async def until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    async with patience(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_events_reach_the_local_index(redis_server: Any) -> None:
    """Snapshot, then stored and removed blocks of two replicas, reach the local index unchanged."""
    async with mesh_on(redis_server) as mesh:
        engines = {name: Engine(index, f"boot-{name}") for index, name in enumerate(("a", "b"))}
        for name, engine in engines.items():
            engine.store(5)
            mesh.publish(name, engine)
        mesh.read("a", "b")
        for _ in range(30):
            for name, engine in engines.items():
                publisher = mesh.publishers[name]
                publisher.on_engine_message(engine.store())
                if engine.rng.random() < 0.4:
                    publisher.on_engine_message(engine.remove_last())
            await asyncio.sleep(0)
        for name, engine in engines.items():
            await until(lambda name=name, engine=engine: mesh.agrees(name, engine))  # type: ignore[misc]
        mesh.local_index.assert_consistent()
        assert mesh.reader.reload_total == 2


async def test_a_router_started_later_has_the_full_index(redis_server: Any) -> None:
    """Cold start: snapshots, then the later entries of the stream; also for a replica that has left cleanly."""
    async with mesh_on(redis_server) as mesh:
        engines = {name: Engine(index, f"boot-{name}") for index, name in enumerate(("a", "b"))}
        for name, engine in engines.items():
            mesh.publish(name, engine)
        await until(lambda: all(one.snapshot_total for one in mesh.publishers.values()))
        for _ in range(20):
            for name, engine in engines.items():
                mesh.publishers[name].on_engine_message(engine.store())
        await mesh.stop("a")
        await mesh.publishers["a"].close()
        await until(lambda: mesh.publishers["b"].published_block_total == 60)
        mesh.read("a", "b")
        for name, engine in engines.items():
            await until(lambda name=name, engine=engine: mesh.agrees(name, engine))  # type: ignore[misc]
        assert mesh.reader.is_caught_up


async def test_an_engine_that_boots_anew_has_an_empty_cache(redis_server: Any) -> None:
    """A new epoch replaces all blocks of its replica and none of others."""
    async with mesh_on(redis_server) as mesh:
        engine, other = Engine(1, "boot-1"), Engine(2, "boot-o")
        engine.store(50)
        other.store(7)
        mesh.publish("a", engine)
        mesh.publish("b", other)
        mesh.read("a", "b")
        await until(lambda: mesh.agrees("a", engine) and mesh.agrees("b", other))
        fresh = Engine(3, "boot-2")
        mesh.publishers["a"].on_engine_message(fresh.snapshot())
        mesh.publishers["a"].on_engine_message(fresh.store(2))
        await until(lambda: mesh.agrees("a", fresh))
        assert mesh.agrees("b", other)
        assert mesh.local_index.position_of("a")[0] == "boot-2"


async def test_lost_entries_are_detected_and_repaired_by_a_snapshot(redis_server: Any) -> None:
    """Entries deleted before they were read leave a gap in the chain: only that replica is loaded again."""
    async with mesh_on(redis_server, interval_s=0.5) as mesh:
        engine, other = Engine(1), Engine(2)
        mesh.publish("a", engine)
        mesh.publish("b", other)
        mesh.read("a", "b")
        await until(lambda: mesh.agrees("a", engine) and mesh.agrees("b", other))
        await mesh.stop("reader")
        reloads = mesh.reader.reload_total
        before = mesh.publishers["a"].published_block_total
        mesh.publishers["a"].on_engine_message(engine.store())
        await until(lambda: mesh.publishers["a"].published_block_total > before)
        await mesh.link.execute("XTRIM", "m:kv", "MAXLEN", 0)
        mesh.publishers["a"].on_engine_message(engine.store())
        mesh.publishers["b"].on_engine_message(other.store())
        mesh.read("a", "b")
        await until(lambda: mesh.agrees("a", engine) and mesh.agrees("b", other))
        assert mesh.reader.reload_total > reloads


@pytest.mark.parametrize("is_reader_first", [True, False])
async def test_the_local_index_is_stale_without_redis_and_catches_up(
    redis_server: Any, is_reader_first: bool
) -> None:
    """Redis dies and comes back empty: lookups continue meanwhile (stale reads), and afterwards the local index is
    right again.
    """
    async with mesh_on(redis_server) as mesh:
        engine = Engine(1)
        engine.store(10)
        mesh.publish("a", engine)
        mesh.read("a")
        await until(lambda: mesh.agrees("a", engine))
        redis_server.stop()
        for _ in range(5):
            mesh.publishers["a"].on_engine_message(engine.store())
        first = mesh.reader_link if is_reader_first else mesh.link
        await until(lambda: not first.is_connected)
        assert mesh.local_index.blocks_of("a") == 10
        await redis_server.start()
        mesh.publishers["a"].on_engine_message(engine.store())
        await until(lambda: mesh.agrees("a", engine))


async def test_foreign_entries_in_redis_are_skipped(redis_server: Any) -> None:
    """Foreign entries and a damaged snapshot are counted and have no other effect."""
    async with mesh_on(redis_server, interval_s=0.3) as mesh:
        engine = Engine(1)
        await mesh.link.execute("SET", "m:snap:a", b"KVS1 nonsense")
        await mesh.link.execute("XADD", "m:kv", "*", "b", b"\x00\x01")
        await mesh.link.execute("XADD", "m:kv", "*", "other", b"x")
        mesh.read("a")
        await until(lambda: mesh.reader.unreadable_total >= 1)
        await mesh.link.execute(
            "XADD",
            "m:kv",
            "*",
            "b",
            events.encode_batch(events.Batch("nobody", "e", 0, 1, events.Op.STORED, (1, 2))),
        )
        mesh.publish("a", engine)
        mesh.publishers["a"].on_engine_message(engine.store())
        await until(lambda: mesh.agrees("a", engine))
        await until(lambda: mesh.reader.is_caught_up)


async def test_the_stream_is_trimmed_but_keeps_three_intervals(redis_server: Any) -> None:
    """Old entries are removed, so that Redis does not grow; entries younger than three snapshot intervals stay."""
    async with mesh_on(redis_server, interval_s=0.1) as mesh:
        engine = Engine(1)
        publisher = mesh.publish("a", engine)
        await until(lambda: publisher.snapshot_total >= 1)
        oldest = (await mesh.link.execute("XRANGE", "m:kv", "-", "+", "COUNT", 1))[0][0]
        for _ in range(600):
            publisher.on_engine_message(engine.store(1))
            await asyncio.sleep(0.002)
        await until(lambda: publisher.snapshot_total >= 8)
        first = (await mesh.link.execute("XRANGE", "m:kv", "-", "+", "COUNT", 1))[0][0]
        last = (await mesh.link.execute("XREVRANGE", "m:kv", "+", "-", "COUNT", 1))[0][0]
        kept_ms = events.parse_stream_id(last)[0] - events.parse_stream_id(first)[0]
        assert kept_ms >= 300
        assert events.parse_stream_id(first) > events.parse_stream_id(oldest)


async def test_the_stream_is_trimmed_while_the_clock_of_redis_stands_still(redis_server: Any) -> None:
    """A clock that ran an hour ahead leaves an entry of that time, and all later entries get its time."""
    async with mesh_on(redis_server, interval_s=0.05) as mesh:
        seconds, _ = await mesh.link.execute("TIME")
        ahead_ms = (int(seconds) + 3600) * 1000
        await mesh.link.execute("XADD", "m:kv", f"{ahead_ms}-0", events.FIELD, b"")
        engine = Engine(1)
        publisher = mesh.publish("a", engine)
        first = last = (ahead_ms, 0)
        async with patience(15):
            while first == (ahead_ms, 0):
                publisher.on_engine_message(engine.store(1))
                await asyncio.sleep(0.002)
                first, last = [
                    events.parse_stream_id((await mesh.link.execute(*command, "COUNT", 1))[0][0])
                    for command in (("XRANGE", "m:kv", "-", "+"), ("XREVRANGE", "m:kv", "+", "-"))
                ]
        assert last[0] == ahead_ms
        mesh.read("a")
        await until(lambda: mesh.agrees("a", engine))


async def test_no_key_of_the_index_outlives_the_mesh_for_good(redis_server: Any) -> None:
    """The stream of events expires as the snapshots do: a mesh that has ended leaves no keys behind."""
    async with mesh_on(redis_server) as mesh:
        engine = Engine(3)
        publisher = mesh.publish("prefill-0", engine)
        for _ in range(5):
            publisher.on_engine_message(engine.store())
        mesh.read("prefill-0")
        await until(lambda: mesh.agrees("prefill-0", engine))
        keys = await mesh.link.execute("KEYS", "*")
        lives = {key: await mesh.link.execute("TTL", key) for key in keys}
        assert set(lives) == {b"m:kv", b"m:snap:prefill-0"}
        assert all(0 < life_s <= 3000 for life_s in lives.values()), lives
