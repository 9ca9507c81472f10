"""Prepares a trace for the replay: blocks as hashes, spread timestamps, and overlaid copies.

Pure; randomness is injected. The replay is an open loop: arrivals do not wait for answers.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from simulator.trace import Record, Trace

SIGMA: Final = 0.1
"""Spread of the noise on service times (lognormal, mean 1)."""

SHIFT_MAX_S: Final = 60.0
"""Copies of a trace start up to this late."""

_MASK: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival. The lists run in parallel."""

    arrivals_s: list[float]
    """At the trace's own rate, from 0."""
    tokens: list[int]
    hashes: list[tuple[int, ...]]
    noise: list[float]
    """Factor on the service time, the same for all policies; mean 1."""
    unique_blocks: int
    longest_blocks: int
    block_tokens: int

    def __len__(self) -> int:
        return len(self.arrivals_s)

    @property
    def span_s(self) -> float:
        """Seconds until the last arrival."""
        return self.arrivals_s[-1]


def workload(trace: Trace, seed: int, copies: int = 1) -> Workload:
    """Return `copies` copies of `trace`. Each has other blocks, except for the most common first block."""
    rng = random.Random(f"{seed}/arrivals")
    common = Counter(record.blocks[0] for record in trace.records).most_common(1)[0][0]
    rows: list[tuple[float, int, tuple[int, ...]]] = []
    for copy in range(copies):
        shift_s = rng.uniform(0, SHIFT_MAX_S) if copy else 0.0
        chains: dict[tuple[int, int], int] = {}
        for at_s, record in zip(spread(trace.records, rng), trace.records, strict=True):
            rows.append((at_s + shift_s, record.input_tokens, _chain(record.blocks, copy, common, chains)))
    if copies > 1:
        rows.sort(key=lambda row: row[0])
    draw = random.Random(f"{seed}/noise")
    return Workload(
        [at_s for at_s, _, _ in rows],
        [tokens for _, tokens, _ in rows],
        [hashes for _, _, hashes in rows],
        [math.exp(draw.gauss(-SIGMA * SIGMA / 2, SIGMA)) for _ in rows],
        len({value for _, _, hashes in rows for value in hashes}),
        trace.longest_blocks,
        trace.block_tokens,
    )


def spread(records: Sequence[Record], rng: random.Random) -> list[float]:
    """Return arrivals in seconds from the first timestamp.

    Timestamps are bins if there are at least twice as many requests as distinct values. The requests of a bin are then
    spread evenly at random until the next bin, in their order. Requests at one time would be bursts that never happened.
    """
    stamps = [record.timestamp_ms / 1e3 for record in records]
    first = stamps[0]
    distinct = sorted(set(stamps))
    if len(distinct) < 2 or 2 * len(distinct) > len(stamps):
        return [stamp - first for stamp in stamps]
    gaps = sorted(after - before for before, after in pairwise(distinct))
    width = gaps[len(gaps) // 2]
    until = {before: min(after, before + width) for before, after in pairwise(distinct)}
    until[distinct[-1]] = distinct[-1] + width
    arrivals = [rng.uniform(stamp, until[stamp]) for stamp in stamps]
    arrivals.sort()  # bins do not overlap, so this orders inside each
    return [arrival - first for arrival in arrivals]


def _chain(
    blocks: tuple[int, ...], copy: int, common: int, chains: dict[tuple[int, int], int]
) -> tuple[int, ...]:
    """Return 64-bit hashes that cover the whole prefix, as those of the mesh do."""
    parent = 0 if blocks[0] == common else copy
    hashes = []
    for index, block in enumerate(blocks):
        if index == 1 and parent:
            parent ^= _mix(copy)
        value = chains.get((parent, block))
        if value is None:
            value = chains[parent, block] = _mix(parent ^ _mix(block + 1))
        hashes.append(value)
        parent = value
    return tuple(hashes)


def _mix(value: int) -> int:
    """Splitmix64: a bijection of 64-bit numbers that leaves no pattern."""
    value = (value + _STEP) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
