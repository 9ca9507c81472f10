"""The process that measures the prefix index: a mirror of its own, filled from memory or read from Redis.

Alone in its process, because it measures memory by the growth of that process. Run as `python -m bench.index_probe`,
steered over stdin.
"""

from __future__ import annotations

import argparse
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
from kvmesh.prefix_index.events import Snapshot
from services.router.mirror import PrefixMirror

REPLICAS = 4
CHAIN_BLOCKS = 256
LOOKUPS = 500
ROUNDS = 5
EPOCH = "bench"


def block_hash(chain: int, depth: int) -> int:
    """Return the hash of block `depth` of chain `chain`: known without a list of all of them."""
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", chain, depth))


def snapshot(replica: int, block_count: int) -> Snapshot:
    """Return the cache of one of REPLICAS replicas that hold `block_count` distinct blocks between them."""
    hashes = array("Q")
    for chain in range(replica, block_count // CHAIN_BLOCKS, REPLICAS):
        hashes.extend([block_hash(chain, depth) for depth in range(CHAIN_BLOCKS)])
    return Snapshot(f"prefill-{replica}", EPOCH, 1, (0, 0), hashes.tobytes())


class IndexProbe:
    """A mirror and its measurements."""

    def __init__(self, seed: int) -> None:
        self.mirror = PrefixMirror()
        self._draw = random.Random(seed)

    async def fill(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        """Load {blocks} from memory; tell bytes per block and the longest slice of loading, in ms of CPU."""
        for replica in range(REPLICAS):
            self.mirror.add(f"prefill-{replica}")
        gc.collect()
        before = accounting.rss_bytes(os.getpid())
        slices_ns = [0]
        for replica in range(REPLICAS):
            loading = self.mirror.load(snapshot(replica, command["blocks"]))
            started_ns = time.thread_time_ns()
            for _ in loading:
                now_ns = time.thread_time_ns()
                slices_ns.append(now_ns - started_ns)
                started_ns = now_ns
            slices_ns.append(time.thread_time_ns() - started_ns)
        gc.collect()
        grown = accounting.rss_bytes(os.getpid()) - before
        count = self.mirror.block_count
        return {
            "blocks": count,
            "bytes_per_block": grown / count,
            "slice_ms": max(slices_ns) / 1e6,
            "load_s": sum(slices_ns) / 1e9,
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
    await control.serve_commands({"fill": probe.fill, "lookup": probe.lookup}, {"ready": True})


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="bench.index_probe", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
