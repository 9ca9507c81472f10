"""The prefix index alone: lookups, memory, and stalls of the router while it loads the index or catches up.

The process under test is this module as a process, with a local index that it reads from Redis as a router does. It is
alone in its process, because memory is measured by the growth of the process.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import statistics
import struct
import time
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from bench import accounting, aims, control
from bench.loop_watch import LoopWatch
from bench.processes import ANY_CORE, TEST_CORE, Fleet, ask_all
from bench.results import ScenarioResults
from bench.windows import Pace
from kvmesh.prefix_index import events
from kvmesh.prefix_index.events import Batch, Op, Snapshot
from kvmesh.redis_link import Command, RedisLink, key
from services.router.index.index_reader import IndexReader
from services.router.index.local_index import LocalPrefixIndex

LOAD_TIMEOUT_S = 300.0
DEPTHS = (8, 64, 256)
SIZES = {"10k": 10_240, "100k": 102_400, "1M": 1_024_000}
FULL_SIZES = {**SIZES, "10M": 10_240_000}
QUICK_SIZES = {"10k": 10_240, "1M": 1_024_000}
BURST_ENTRIES = 100_000
ROUTERS = 16
ROUTERS_BLOCKS = 102_400
ROUTERS_ENTRIES = 10_000
REPLICAS = 4
BLOCKS_MAX = 20_000_000
"""Bound of the local index, above every size measured."""

CHAIN_BLOCKS = 256
LOOKUPS = 500
ROUNDS = 5
EPOCH = "bench"
MESH = "bench"
BURST_BLOCKS = 4
"""Blocks of one event of a burst: a few engine steps."""

BURST_PIPELINE = 500
WATCH_S = 0.001
SETTLE_S = 0.2
"""Pause until the reader waits again. asyncio.wait_for of Python 3.11 may lose a cancel during a send."""


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    sizes = QUICK_SIZES if pace.is_quick else FULL_SIZES if pace.is_full else SIZES
    for name, blocks in sizes.items():
        _one_router(results, name, blocks)
    if not pace.is_quick:
        _many_routers(results)


def _one_router(results: ScenarioResults, name: str, blocks: int) -> None:
    with Fleet() as fleet:
        redis_url = fleet.redis()
        writer = fleet.start_ready("replicas", __name__)
        writer.ask("publish", redis=redis_url, blocks=blocks, timeout_s=LOAD_TIMEOUT_S)
        probe = fleet.start_ready("index", __name__, TEST_CORE)
        loaded = probe.ask("load", redis=redis_url, blocks=blocks, timeout_s=LOAD_TIMEOUT_S)
        case = f"{name} blocks"
        results.add(case, "memory per block", "bytes", loaded["bytes_per_block"])
        results.add(case, "longest stall while loading", "ms", loaded["stall_ms"])
        results.add(case, aims.LOAD_BUSY, "ms", loaded["stall_cpu_ms"])
        results.add(case, "cold start", "s", loaded["seconds"])
        results.add(case, "CPU of a cold start", "s", loaded["cpu_s"])
        for depth in DEPTHS:
            looked = probe.ask("lookup", depth=depth, blocks=blocks)
            results.add(f"lookup of {depth} blocks, {name} in the index", "time", "us", looked["us"])
        writer.ask("publish_burst", redis=redis_url, entries=BURST_ENTRIES, timeout_s=LOAD_TIMEOUT_S)
        read = probe.ask("burst", entries=BURST_ENTRIES, timeout_s=LOAD_TIMEOUT_S)
        case = f"{name} blocks, a burst of {BURST_ENTRIES:,} events"
        results.add(case, "longest stall", "ms", read["stall_ms"])
        results.add(case, aims.BURST_BUSY, "ms", read["stall_cpu_ms"])
        results.add(case, "time", "s", read["seconds"])
        results.add(case, "CPU per event", "us", read["cpu_s"] / BURST_ENTRIES * 1e6)


def _many_routers(results: ScenarioResults) -> None:
    """Start 16 routers at once on both cores, then let them read the same events."""
    case = f"{ROUTERS} routers at once, 100k blocks each"
    with Fleet() as fleet:
        redis_url = fleet.redis()
        writer = fleet.start_ready("replicas", __name__, ANY_CORE)
        writer.ask("publish", redis=redis_url, blocks=ROUTERS_BLOCKS)
        probes = [fleet.start_ready(f"router-{index}", __name__, ANY_CORE) for index in range(ROUTERS)]

        loaded = ask_all(probes, "load", redis=redis_url, blocks=ROUTERS_BLOCKS, timeout_s=LOAD_TIMEOUT_S)
        results.add(case, "cold start of the slowest", "s", max(one["seconds"] for one in loaded))
        results.add(case, aims.LOAD_BUSY, "ms", max(one["stall_cpu_ms"] for one in loaded))
        writer.ask("publish_burst", redis=redis_url, entries=ROUTERS_ENTRIES)
        read = ask_all(probes, "burst", entries=ROUTERS_ENTRIES, timeout_s=LOAD_TIMEOUT_S)
        seconds = max(one["seconds"] for one in read)
        results.add(case, f"the slowest has read {ROUTERS_ENTRIES:,} events", "s", seconds)
        results.add(case, aims.BURST_BUSY, "ms", max(one["stall_cpu_ms"] for one in read))


def block_hash(chain: int, depth: int) -> int:
    """Return the hash of block `depth` of chain `chain`, computed without a list of all blocks."""
    return xxhash.xxh3_64_intdigest(struct.pack("<qQ", chain, depth))


def snapshot(replica: int, block_count: int) -> Snapshot:
    """Return the cache of one of REPLICAS replicas. Together they hold `block_count` distinct blocks."""
    hashes = array("Q")
    for chain in range(replica, block_count // CHAIN_BLOCKS, REPLICAS):
        hashes.extend([block_hash(chain, depth) for depth in range(CHAIN_BLOCKS)])
    return Snapshot(name_of(replica), EPOCH, 1, (0, 0), hashes.tobytes())


def name_of(replica: int) -> str:
    """Return the name of a replica."""
    return f"prefill-{replica}"


def _entry(batch: Batch) -> Command:
    return ("XADD", key(MESH, "kv"), "*", events.FIELD, events.encode_batch(batch))


class IndexProbe:
    """A local index and its measurements."""

    def __init__(self, seed: int) -> None:
        self.local_index = LocalPrefixIndex(BLOCKS_MAX)
        self._reader: IndexReader | None = None
        self._draw = random.Random(seed)

    async def publish(self, redis: str, blocks: int) -> None:
        """Write the snapshots of {blocks} to {redis}, as replicas do. A process other than the loading one does this."""
        link = RedisLink(redis)
        try:
            for replica in range(REPLICAS):
                written = snapshot(replica, blocks)
                await link.execute("SET", key(MESH, "snap", written.replica), events.encode_snapshot(written))
                note = Batch(written.replica, EPOCH, 1, 1, Op.SNAPSHOT, (), written.block_count)
                await link.execute(*_entry(note))
        finally:
            await link.close()

    async def publish_burst(self, redis: str, entries: int) -> None:
        """Write {entries} events to the stream of {redis}: new blocks of each replica in turn."""
        link = RedisLink(redis)
        waiting: list[Command] = []
        try:
            for index in range(entries):
                seq = 2 + index // REPLICAS
                hashes = tuple(block_hash(-1 - index, depth) for depth in range(BURST_BLOCKS))
                waiting.append(
                    _entry(Batch(name_of(index % REPLICAS), EPOCH, seq - 1, seq, Op.STORED, hashes))
                )
                if len(waiting) == BURST_PIPELINE:
                    await link.pipeline(waiting)
                    waiting = []
            await link.pipeline(waiting)
        finally:
            await link.close()

    async def load(self, redis: str, blocks: int) -> Mapping[str, Any]:
        """Start as a router does, from nothing to a complete index of {blocks} in {redis}.

        Return the figures of `_read_until` and the bytes of memory per block.
        """
        link = RedisLink(redis)
        await link.execute("PING")
        reader = self._reader = IndexReader(link, MESH, self.local_index)
        gc.collect()
        before = accounting.rss_bytes(os.getpid())
        reader.set_replicas(name_of(replica) for replica in range(REPLICAS))
        figures = await self._read_until(lambda: reader.reload_total == REPLICAS)  # all replicas are loaded
        gc.collect()
        count = self.local_index.block_count
        if count != blocks // CHAIN_BLOCKS * CHAIN_BLOCKS:
            raise RuntimeError(f"{count} of {blocks} blocks loaded")
        grown = accounting.rss_bytes(os.getpid()) - before
        return {**figures, "bytes_per_block": grown / count}

    async def burst(self, entries: int) -> Mapping[str, Any]:
        """Read the {entries} of the stream since `load`. Return the figures of `_read_until`."""
        last = [1 + len(range(replica, entries, REPLICAS)) for replica in range(REPLICAS)]
        before = self.local_index.block_count
        figures = await self._read_until(
            lambda: [self.local_index.position_of(name_of(replica))[1] for replica in range(REPLICAS)] == last
        )
        if self.local_index.block_count != before + entries * BURST_BLOCKS:
            raise RuntimeError(f"{self.local_index.block_count - before} blocks read")
        return figures

    async def _read_until(self, is_done: Callable[[], bool]) -> dict[str, float]:
        """Run the reader until `is_done`. Return seconds, CPU and stalls of the event loop."""
        assert self._reader is not None
        async with asyncio.TaskGroup() as tasks:
            watch = LoopWatch(WATCH_S)
            watching = tasks.create_task(watch.run(), name="loop-watch")
            await asyncio.sleep(0.05)
            started_s, cpu_started_s = time.monotonic(), time.process_time()
            reading = tasks.create_task(self._reader.run(), name="index-reader")
            while not is_done():
                await asyncio.sleep(0.001)
            seconds, cpu_s = time.monotonic() - started_s, time.process_time() - cpu_started_s
            watching.cancel()
            await asyncio.sleep(SETTLE_S)
            reading.cancel()
        stalls = {"stall_ms": watch.longest_s * 1000, "stall_cpu_ms": watch.busiest_s * 1000}
        return {"seconds": seconds, "cpu_s": cpu_s, **stalls}

    async def lookup(self, depth: int, blocks: int) -> Mapping[str, Any]:
        """Look up {depth} blocks of random chains, the first half known. Return the median CPU of a lookup, in us."""
        chains = blocks // CHAIN_BLOCKS
        rounds_us = []
        for _ in range(ROUNDS):
            asked = [self._query(self._draw.randrange(chains), depth) for _ in range(LOOKUPS)]
            started_ns = time.thread_time_ns()
            for hashes in asked:
                self.local_index.matched(hashes)
            rounds_us.append((time.thread_time_ns() - started_ns) / 1e3 / LOOKUPS)
            hit = self.local_index.matched(asked[0])
            if list(hit.values()) != [depth // 2]:
                raise RuntimeError(f"the index answered {hit} for {depth // 2} known blocks")
        return {"us": statistics.median(rounds_us)}

    def _query(self, chain: int, depth: int) -> list[int]:
        known = [block_hash(chain, at) for at in range(depth // 2)]
        return known + [self._draw.getrandbits(64) for _ in range(depth - len(known))]


async def serve(seed: int = 1) -> None:
    """Serve until stdin ends."""
    probe = IndexProbe(seed)
    gc.collect()
    gc.freeze()  # as a router does before it serves
    await control.serve_commands(probe.publish, probe.publish_burst, probe.load, probe.burst, probe.lookup)


if __name__ == "__main__":
    control.main(serve, __doc__)
