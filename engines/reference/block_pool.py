"""The paged KV cache's block manager: who holds which block, and which full blocks can be reused as a prefix.

Owns block ids, reference counts, the prefix table and the eviction order. It never touches the stored KV
itself, has no clock and does no I/O. A block id is always in exactly one of three places:

    free       nobody holds it, content meaningless
    held       reference count >= 1: by running sequences or by a held handoff
    evictable  reference count 0, content reachable through the prefix table, in least-recently-released order
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

Tokens = npt.NDArray[np.int32]


def root_hash(salt: bytes) -> int:
    """The parent of every first block: xxh3_64 of the salt."""
    return xxhash.xxh3_64_intdigest(salt)


def block_hash(tokens: bytes, parent: int) -> int:
    """Hash of one block: xxh3_64 of its little-endian int32 tokens, seeded with the parent's hash."""
    return xxhash.xxh3_64_intdigest(tokens, seed=parent)


def chain_hashes(tokens: Tokens, block_tokens: int, root: int) -> list[int]:
    """Hashes of the full blocks of `tokens` (int32 [n]), in order; n // block_tokens of them. Pure."""
    raw = memoryview(tokens.astype("<i4", copy=False).tobytes())
    width, parent, hashes = 4 * block_tokens, root, []
    for offset in range(0, len(raw) - width + 1, width):
        parent = xxhash.xxh3_64_intdigest(raw[offset : offset + width], seed=parent)
        hashes.append(parent)
    return hashes


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks became reusable; block i's parent is i-1, the first one's parent is `parent` (None: the root)."""

    parent: int | None
    blocks: tuple[tuple[int, bytes], ...]  # (block hash, its tokens as little-endian int32)


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks are no longer reusable."""

    hashes: tuple[int, ...]


KvCacheEvent = BlocksStored | BlocksRemoved


@dataclass(slots=True)
class _CachedBlock:
    """A full block in the prefix table."""

    block_id: int
    parent: int | None
    tokens: bytes


@dataclass(slots=True)
class BlockPool:
    """Allocates blocks and reuses prefixes.

    Invariants (`assert_consistent`): free, held and evictable partition the ids; a cached block's parent is
    cached; whoever holds a cached block holds all its ancestors (so an evictable block has only evictable
    descendants, and releasing tail first makes plain least-recently-released order leaf-first).
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
        """Blocks that can be allocated now: free or evictable."""
        return len(self._free) + len(self._evictable)

    @property
    def cached(self) -> int:
        """Blocks in the prefix table, held or evictable."""
        return len(self._cached)

    def match(self, hashes: Sequence[int]) -> list[int]:
        """Block ids of the longest cached prefix of `hashes`. Takes no references: allocate before anything
        else happens.
        """
        matched: list[int] = []
        for value in hashes:
            cached = self._cached.get(value)
            if cached is None:
                break
            matched.append(cached.block_id)
        return matched

    def can_allocate(self, matched: Sequence[int], total: int) -> bool:
        """Whether `matched` can be held and filled up to `total` blocks."""
        revived = sum(1 for block_id in matched if self._references[block_id] == 0)
        return total - len(matched) <= self.available - revived

    def allocate(self, matched: Sequence[int], total: int) -> list[int]:
        """Hold `matched` and new blocks up to `total`, evicting as needed; the caller releases exactly once."""
        if not self.can_allocate(matched, total):
            raise ValueError(
                f"cannot allocate {total} blocks, {len(matched)} matched, {self.available} available"
            )
        for block_id in matched:
            if self._references[block_id] == 0:
                del self._evictable[block_id]
            self._references[block_id] += 1
        fresh = [self._allocate_block() for _ in range(total - len(matched))]
        return [*matched, *fresh]

    def register(self, block_id: int, value: int, parent: int | None, tokens: bytes) -> int:
        """Make a full, computed block reusable; return the block id its holder must use from now on.

        When the same content is cached already, the holder's reference moves to that block and `block_id` is
        freed: content is a function of the history, so they are equal. Without reuse nothing is registered.
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
        """Give up one reference on each block of one sequence, given first to last; registered blocks stay
        reusable.
        """
        for block_id in reversed(block_ids):
            self._release_block(block_id)

    def drain_events(self) -> list[KvCacheEvent]:
        """Events since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> list[BlocksStored]:
        """The whole prefix table as stored events, parents before children."""
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
        assert not (free & held or free & evictable or held & evictable), "a block is in two places"
        assert len(free) + len(held) + len(evictable) == self.block_count, "a block is lost"
        assert min(self._references) >= 0, "negative reference count"
        assert {cached.block_id for cached in self._cached.values()} == set(self._hash_of), (
            "prefix table out of step"
        )
        assert evictable <= set(self._hash_of), "an evictable block is not reusable"
        assert not free & set(self._hash_of), "a free block is reusable"
        order = {block_id: place for place, block_id in enumerate(self._evictable)}
        for cached in self._cached.values():
            if cached.parent is None:
                continue
            assert cached.parent in self._cached, "a cached block lost its parent"
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
        assert count > 0, f"block {block_id} released more often than held"
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
