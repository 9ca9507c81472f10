"""A radix tree of recorded prompts, and the order of their hot prefixes. Pure.

An edge has the blocks between two nodes. A node is the end of a recorded prompt, or a block at which two prompts part. So
the tree has at most two nodes for each record, however long the prompts are.

Blocks are compared by their chained hashes: equal hashes mean equal prefixes (kvmesh.blocks). The common part of two
prompts is therefore found by bisection.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count
from typing import Final, NamedTuple

from services.router.hot.decay import decayed
from services.router.hot.prompt_records import PromptRecord

TENANTS_MAX: Final = 255
"""Tenants of a prefix are counted up to this number."""

HASH_BYTES: Final = 8

SLICE_NODES: Final = 128
"""Nodes in one slice of `ranked`."""

Tenants = set[int] | frozenset[int]


class HotPrefix(NamedTuple):
    """The first `block_count` blocks of `record`."""

    record: PromptRecord
    block_count: int
    weight: float
    """Decayed requests of all records that begin with the prefix."""
    tenant_count: int
    """Distinct tenants of these records, counted up to TENANTS_MAX."""


class _Node:
    """The blocks [start, end) behind the parent node, as in `record`, and the records that have all of them."""

    __slots__ = ("children", "end", "record", "start", "tenants", "weight")

    def __init__(self, record: PromptRecord, start: int, end: int, weight: float, tenants: Tenants) -> None:
        self.record = record
        self.start = start
        self.end = end
        self.weight = weight
        self.tenants = tenants
        """Numbers of tenants. A frozenset is shared, and is replaced before a change."""
        self.children: dict[bytes, _Node] = {}
        """By the hash of their first block."""

    def take(self, weight: float, tenant: frozenset[int]) -> None:
        """Count a record that has all blocks of the node."""
        self.weight += weight
        if not tenant <= self.tenants and len(self.tenants) < TENANTS_MAX:
            if isinstance(self.tenants, frozenset):
                self.tenants = set(self.tenants)
            self.tenants |= tenant


class PrefixTree:
    """Collects records, and returns their prefixes by expected reuse.

    The order is greedy and prefix-closed: each next prefix adds the blocks of the heaviest node whose parent is in the
    list. The weight of a node is the expected number of requests that begin with its blocks. A cached block saves each
    of them about the same prefill time. So the weight is the value of a block, and the blocks of one edge have equal value.
    A block without its ancestors is worth nothing.

    No child is heavier than its parent. So the greedy order is the order by weight, and its first N blocks save the most
    time of all prefix-closed sets of N blocks, for every N. Shared system prompts come before the sessions that begin with
    them, and sessions follow by their own weight.
    """

    def __init__(self, block_tokens: int, depth_max: int) -> None:
        """`depth_max`: the blocks of a prompt beyond it are left out."""
        self._block_bytes = 4 * block_tokens
        self._depth_max = depth_max
        self._roots: dict[bytes, _Node] = {}
        self._tenants: dict[str, frozenset[int]] = {}
        """A number for each tenant, as a set of one."""

    def insert(self, record: PromptRecord, now_s: float) -> None:
        """Add a record with its weight at `now_s`. O(nodes on its path x log blocks)."""
        hashes = record.block_hashes
        weight = decayed(record.weight, now_s - record.at_s)
        tenant = self._tenants.setdefault(record.tenant, frozenset((len(self._tenants),)))
        whole = min(len(hashes) // HASH_BYTES, len(record.token_ids) // self._block_bytes, self._depth_max)
        depth, children = 0, self._roots
        while depth < whole:
            key = hashes[HASH_BYTES * depth : HASH_BYTES * (depth + 1)]
            node = children.get(key)
            if node is None:
                children[key] = _Node(record, depth, whole, weight, tenant)
                return
            common = _common(node.record.block_hashes, hashes, depth + 1, min(node.end, whole))
            if common < node.end:
                node = children[key] = _split(node, common)
            node.take(weight, tenant)
            depth, children = common, node.children

    def ranked(self, block_count_max: int, tenant_count_min: int) -> Iterator[HotPrefix | None]:
        """Yield prefixes in the order of the class, until they have `block_count_max` distinct blocks together.

        Only prefixes of at least `tenant_count_min` tenants are yielded. So of a prompt with too few tenants, the longest
        leading part with enough of them is there. The last prefix may be cut to fit. None ends a slice.
        """
        heap: list[tuple[float, int, int, _Node]] = []
        numbers, left, seen, waiting = count(), block_count_max, 0, self._roots
        while left > 0:
            for node in waiting.values():
                if len(node.tenants) >= tenant_count_min:
                    heapq.heappush(heap, (-node.weight, node.end, next(numbers), node))
                seen += 1
                if seen % SLICE_NODES == 0:
                    yield None
            if not heap:
                return
            _, _, _, node = heapq.heappop(heap)
            end = min(node.end, node.start + left)
            left -= end - node.start
            yield HotPrefix(node.record, end, node.weight, len(node.tenants))
            waiting = node.children


def _common(one: bytes, other: bytes, low: int, high: int) -> int:
    """Return how many leading blocks of two prompts are equal, at most `high`. The first `low` are known to be equal."""
    end = high
    while low < high:
        at = HASH_BYTES * (end - 1)
        if one[at : at + HASH_BYTES] == other[at : at + HASH_BYTES]:
            low = end
        else:
            high = end - 1
        end = (low + high + 1) >> 1
    return low


def _split(node: _Node, at: int) -> _Node:
    """Return a new node of the blocks of `node` before `at`, with the rest of `node` as its child."""
    upper = _Node(node.record, node.start, at, node.weight, frozenset(node.tenants))
    hashes = node.record.block_hashes
    node.start = at
    upper.children[hashes[HASH_BYTES * at : HASH_BYTES * (at + 1)]] = node
    return upper
