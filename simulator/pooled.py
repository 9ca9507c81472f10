"""One pooled cache for all replicas, which no real router has: the reference of work, and a bound with one queue. Pure."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from simulator.cost import Cost
from simulator.lru import BlockCache
from simulator.workload import Workload

SPARE_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class Pooled:
    """The workload served in order from one cache."""

    seconds: list[float]
    """Per request, without noise."""
    hit_blocks: list[int]

    @property
    def work_s(self) -> float:
        """Seconds of work in all."""
        return sum(self.seconds)


def capacity_of(load: Workload, share: float, replicas: int) -> int:
    """Return the blocks per replica if all hold `share` of the unique blocks together. The longest prompt always fits."""
    return max(load.longest_blocks + SPARE_BLOCKS, int(load.unique_blocks * share / replicas))


def pool(load: Workload, capacity: float, cost: Cost) -> Pooled:
    """Serve `load` from one cache of `capacity` blocks."""
    cache = BlockCache(capacity)
    seconds, hits = [], []
    for tokens, hashes in zip(load.tokens, load.hashes, strict=True):
        depth = cache.depth(hashes)
        cache.use(hashes)
        seconds.append(cost.seconds(tokens - depth * load.block_tokens, tokens))
        hits.append(depth)
    return Pooled(seconds, hits)


def scale_for(load: Workload, work_s: float, replicas: int, load_factor: float) -> float:
    """Return the factor on arrival times at which the trace lasts `work_s` / (`replicas` * `load_factor`)."""
    return work_s / (replicas * load_factor) / load.span_s


def bound(load: Workload, pooled: Pooled, scale: float, replicas: int) -> tuple[list[float], list[float]]:
    """Return times to first token, and busy seconds per server: one queue, first come, first served, one cache."""
    free = [(0.0, index) for index in range(replicas)]
    busy = [0.0] * replicas
    ttft = []
    for at_s, seconds, noise in zip(load.arrivals_s, pooled.seconds, load.noise, strict=True):
        free_s, server = heapq.heappop(free)
        end_s = max(at_s * scale, free_s) + seconds * noise
        busy[server] += seconds * noise
        heapq.heappush(free, (end_s, server))
        ttft.append(end_s - at_s * scale)
    return ttft, busy
