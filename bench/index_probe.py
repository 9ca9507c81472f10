"""The process that measures the prefix index: a mirror of its own, read from Redis as a router reads it.

Alone in its process, because it measures memory by the growth of that process. Run as `python -m bench.index_probe`,
steered over stdin.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import statistics
import struct
import time
from array import array
from collections.abc import Mapping
from typing import Any

import uvloop
import xxhash

from bench import accounting, control
from kvmesh.prefix_index.events import Snapshot, encode_snapshot
from kvmesh.redis_link import RedisLink, key
from services.router.index_reader import IndexReader
from services.router.mirror import PrefixMirror

REPLICAS = 4
CHAIN_BLOCKS = 256
LOOKUPS = 500
ROUNDS = 5
EPOCH = "bench"
MESH = "bench"
WATCH_S = 0.001
SETTLE_S = 0.2
"""Until the reader waits for news: asyncio.wait_for of Python 3.11 may lose a cancel in the middle of a send."""


def block_hash(chain: int, depth: int) -> int:
    """Return the hash of block `depth` of chain `chain`: known without a list of all of them."""
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", chain, depth))


def snapshot(replica: int, block_count: int) -> Snapshot:
    """Return the cache of one of REPLICAS replicas that hold `block_count` distinct blocks between them."""
    hashes = array("Q")
    for chain in range(replica, block_count // CHAIN_BLOCKS, REPLICAS):
        hashes.extend([block_hash(chain, depth) for depth in range(CHAIN_BLOCKS)])
    return Snapshot(name_of(replica), EPOCH, 1, (0, 0), hashes.tobytes())


def name_of(replica: int) -> str:
    """Return the name of a replica."""
    return f"prefill-{replica}"


class LoopWatch:
    """Wants to run every millisecond; what it waits longer for is a stall of the event loop."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.busiest_s = 0.0
        """Most CPU between two turns: a stall without what others took of the core."""

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            wanted_s, cpu_s = time.monotonic() + WATCH_S, time.thread_time()
            await asyncio.sleep(WATCH_S)
            self.longest_s = max(self.longest_s, time.monotonic() - wanted_s)
            self.busiest_s = max(self.busiest_s, time.thread_time() - cpu_s)


class IndexProbe:
    """A mirror and its measurements."""

    def __init__(self, seed: int) -> None:
        self.mirror = PrefixMirror()
        self._draw = random.Random(seed)

    async def publish(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        """Write the snapshots of {blocks} to {redis}, as replicas do. In another process than the one that loads."""
        redis = RedisLink(command["redis"])
        try:
            for replica in range(REPLICAS):
                data = encode_snapshot(snapshot(replica, command["blocks"]))
                await redis.execute("SET", key(MESH, "snap", name_of(replica)), data)
        finally:
            await redis.close()
        return {}

    async def load(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        """Start as a router does, from nothing to a complete mirror of {blocks} in {redis}.

        Tells seconds, milliseconds of the longest stall of the event loop, and bytes of memory per block.
        """
        redis = RedisLink(command["redis"])
        reader = IndexReader(redis, MESH, self.mirror)
        await redis.execute("PING")
        gc.collect()
        before = accounting.rss_bytes(os.getpid())
        async with asyncio.TaskGroup() as tasks:
            watch = LoopWatch()
            watching = tasks.create_task(watch.run(), name="loop-watch")
            await asyncio.sleep(0.05)
            started_s, cpu_started_s = time.monotonic(), time.process_time()
            reader.set_replicas(name_of(replica) for replica in range(REPLICAS))
            reading = tasks.create_task(reader.run(), name="index-reader")
            while reader.reload_total < REPLICAS:  # counts are all it tells
                await asyncio.sleep(0.001)
            seconds, cpu_s = time.monotonic() - started_s, time.process_time() - cpu_started_s
            watching.cancel()
            await asyncio.sleep(SETTLE_S)
            reading.cancel()
        await redis.close()
        gc.collect()
        count = self.mirror.block_count
        if count != command["blocks"] // CHAIN_BLOCKS * CHAIN_BLOCKS:
            raise RuntimeError(f"{count} of {command['blocks']} blocks were loaded")
        grown = accounting.rss_bytes(os.getpid()) - before
        return {
            "seconds": seconds,
            "cpu_s": cpu_s,
            "stall_ms": watch.longest_s * 1000,
            "stall_cpu_ms": watch.busiest_s * 1000,
            "bytes_per_block": grown / count,
        }

    async def lookup(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        """Look up {depth} blocks, the first half known, of random chains; tell the median of some rounds in us of CPU."""
        depth, chains = command["depth"], command["blocks"] // CHAIN_BLOCKS
        rounds_us = []
        for _ in range(ROUNDS):
            asked = [self._query(self._draw.randrange(chains), depth) for _ in range(LOOKUPS)]
            started_ns = time.thread_time_ns()
            for hashes in asked:
                self.mirror.matched(hashes)
            rounds_us.append((time.thread_time_ns() - started_ns) / 1e3 / LOOKUPS)
            hit = self.mirror.matched(asked[0])
            if list(hit.values()) != [depth // 2]:
                raise RuntimeError(f"the index answered {hit} for {depth // 2} known blocks")
        return {"us": statistics.median(rounds_us)}

    def _query(self, chain: int, depth: int) -> list[int]:
        known = [block_hash(chain, at) for at in range(depth // 2)]
        return known + [self._draw.getrandbits(64) for _ in range(depth - len(known))]


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until stdin ends."""
    probe = IndexProbe(arguments.seed)
    await control.serve_commands(
        {"publish": probe.publish, "load": probe.load, "lookup": probe.lookup}, {"ready": True}
    )


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="bench.index_probe", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
