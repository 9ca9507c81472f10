"""The block manager of the paged KV cache: allocation, reference counts, prefix reuse and LRU eviction.

Owns block ids, reference counts, the prefix table (the prefix cache) and the eviction order. The module never
reads or writes the stored KV, has no clock and does no I/O. INVARIANT: a block id is in exactly one of three states:

    free       reference count 0, content meaningless
    held       reference count >= 1: by running sequences or by a held handoff
    evictable  reference count 0, content in the prefix table, in least-recently-released order
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from engines.contract.kv_events import BlocksRemoved, BlocksStored, KvCacheEvent

Tokens = npt.NDArray[np.int32]


def root_hash(salt: bytes) -> int:
    """Return the parent hash of every first block: xxh3_64 of the salt."""
    return xxhash.xxh3_64_intdigest(salt)


def block_hash(tokens: bytes, parent: int) -> int:
    """Return the hash of one block: xxh3_64 of its little-endian int32 tokens, seeded with the parent's hash."""
    return xxhash.xxh3_64_intdigest(tokens, seed=parent)


def chain_hashes(tokens: Tokens, block_tokens: int, root: int) -> list[int]:
    """Return the hashes of the n // block_tokens full blocks of `tokens` (int32 [n]), in order. Pure."""
    raw = memoryview(tokens.astype("<i4", copy=False).tobytes())
    width, parent, hashes = 4 * block_tokens, root, []
    for offset in range(0, len(raw) - width + 1, width):
        parent = xxhash.xxh3_64_intdigest(raw[offset : offset + width], seed=parent)
        hashes.append(parent)
    return hashes


@dataclass(slots=True)
class _CachedBlock:
    """A full block in the prefix table."""

    block_id: int
    parent: int | None
    tokens: bytes


@dataclass(slots=True)
class BlockPool:
    """Allocates KV cache blocks, reuses cached prefixes and evicts in LRU order.

    INVARIANTS, checked by `assert_consistent`:
    - free, held and evictable partition the block ids;
    - the parent of a cached block is cached;
    - the parent of a held cached block is held, so all descendants of an evictable block are evictable.
    A sequence releases its last block first, so least-recently-released order evicts leaves before their parents.
    """

    block_count: int
    block_tokens: int
    salt: bytes = b""
    prefix_reuse: bool = True
    _free: list[int] = field(init=False)
    _references: list[int] = field(init=False)
    _cached: dict[int, _CachedBlock] = field(init=False, default_factory=dict)
    _hash_of: dict[int, int] = field(init=False, default_factory=dict)
    _evictable: OrderedDict[int, None] = field(init=False, default_factory=OrderedDict)
    _events: list[KvCacheEvent] = field(init=False, default_factory=list)
    root: int = field(init=False)

    def __post_init__(self) -> None:
        if self.block_count < 1 or self.block_tokens < 1:
            raise ValueError(
                f"need block_count >= 1 and block_tokens >= 1, got {self.block_count}, {self.block_tokens}"
            )
        self._free = list(range(self.block_count - 1, -1, -1))
        self._references = [0] * self.block_count
        self.root = root_hash(self.salt)

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated now: free or evictable."""
        return len(self._free) + len(self._evictable)

    @property
    def cached(self) -> int:
        """Number of blocks in the prefix table, held or evictable."""
        return len(self._cached)

    def match(self, hashes: Sequence[int]) -> list[int]:
        """Longest prefix match: return the block ids of the longest cached prefix of `hashes`.

        No references are taken. The caller calls `allocate` before any other method changes the pool.
        """
        matched: list[int] = []
        for value in hashes:
            cached = self._cached.get(value)
            if cached is None:
                break
            matched.append(cached.block_id)
        return matched

    def can_allocate(self, matched: Sequence[int], total: int) -> bool:
        """Return whether `allocate` with the same arguments would succeed."""
        revived = sum(1 for block_id in matched if self._references[block_id] == 0)
        return total - len(matched) <= self.available - revived

    def allocate(self, matched: Sequence[int], total: int) -> list[int]:
        """Take a reference on `matched` and on new blocks up to `total`; evict as needed. Return all block ids.

        The caller releases the blocks exactly once. Raises ValueError if too few blocks are available.
        """
        if not self.can_allocate(matched, total):
            raise ValueError(
                f"cannot allocate {total} blocks: {len(matched)} in the prefix cache, {self.available} available"
            )
        for block_id in matched:
            if self._references[block_id] == 0:
                del self._evictable[block_id]
            self._references[block_id] += 1
        fresh = [self._allocate_block() for _ in range(total - len(matched))]
        return [*matched, *fresh]

    def register(self, block_id: int, value: int, parent: int | None, tokens: bytes) -> int:
        """Put a full, computed block into the prefix table; return the block id that the holder uses from now on.

        If a block with the same hash is cached already, the holder's reference moves to the cached block and
        `block_id` is freed. The contents are equal because KV is a function of the history. Without prefix reuse
        `block_id` is returned and the table stays empty.
        """
        if not self.prefix_reuse:
            return block_id
        known = self._cached.get(value)
        if known is None:
            self._cached[value] = _CachedBlock(block_id, parent, tokens)
            self._hash_of[block_id] = value
            self._record_stored(parent, value, tokens)
            return block_id
        if known.block_id == block_id:
            return block_id
        if self._references[known.block_id] == 0:
            del self._evictable[known.block_id]
        self._references[known.block_id] += 1
        self._release_block(block_id)
        return known.block_id

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference on each block of one sequence, given first to last.

        Registered blocks without references become evictable; they stay in the prefix table.
        """
        for block_id in reversed(block_ids):
            self._release_block(block_id)

    def drain_events(self) -> list[KvCacheEvent]:
        """Return the events since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> list[BlocksStored]:
        """Return the whole prefix table as BlocksStored events, parents before children."""
        events: list[BlocksStored] = []
        run: list[tuple[int, bytes]] = []
        parent: int | None = None
        for value, cached in self._cached.items():  # insertion order: a child is registered after its parent
            if run and cached.parent == run[-1][0]:
                run.append((value, cached.tokens))
                continue
            if run:
                events.append(BlocksStored(parent, tuple(run)))
            run, parent = [(value, cached.tokens)], cached.parent
        if run:
            events.append(BlocksStored(parent, tuple(run)))
        return events

    def assert_consistent(self) -> None:
        """Raise AssertionError if an invariant of this class does not hold. O(blocks)."""
        held = {block_id for block_id, count in enumerate(self._references) if count > 0}
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & held or free & evictable or held & evictable), "a block is in two states"
        assert len(free) + len(held) + len(evictable) == self.block_count, "a block is in no state"
        assert min(self._references) >= 0, "negative reference count"
        assert {cached.block_id for cached in self._cached.values()} == set(self._hash_of), (
            "prefix table and block ids differ"
        )
        assert evictable <= set(self._hash_of), "an evictable block is not in the prefix table"
        assert not free & set(self._hash_of), "a free block is in the prefix table"
        order = {block_id: index for index, block_id in enumerate(self._evictable)}
        for cached in self._cached.values():
            if cached.parent is None:
                continue
            assert cached.parent in self._cached, "the parent of a cached block is not cached"
            parent_id = self._cached[cached.parent].block_id
            if cached.block_id in held:
                assert parent_id in held, "a held block's parent is not held"
            elif parent_id in order:
                assert order[cached.block_id] < order[parent_id], "a parent would be evicted before its child"

    def _allocate_block(self) -> int:
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = self._evictable.popitem(last=False)
            value = self._hash_of.pop(block_id)
            del self._cached[value]
            self._record_removed(value)
        self._references[block_id] = 1
        return block_id

    def _release_block(self, block_id: int) -> None:
        count = self._references[block_id]
        assert count > 0, f"block {block_id} released without a reference"
        self._references[block_id] = count - 1
        if count > 1:
            return
        if block_id in self._hash_of:
            self._evictable[block_id] = None
        else:
            self._free.append(block_id)

    def _record_stored(self, parent: int | None, value: int, tokens: bytes) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksStored) and last.blocks[-1][0] == parent:
            self._events[-1] = BlocksStored(last.parent, (*last.blocks, (value, tokens)))
        else:
            self._events.append(BlocksStored(parent, ((value, tokens),)))

    def _record_removed(self, value: int) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved):
            self._events[-1] = BlocksRemoved((*last.hashes, value))
        else:
            self._events.append(BlocksRemoved((value,)))
