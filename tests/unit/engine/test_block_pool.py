"""The block manager compared with a simple reference implementation, under random schedules."""

import random
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from engines.contract.kv_events import BlocksRemoved, BlocksStored
from engines.reference.block_pool import BlockPool, block_hash, chain_hashes, root_hash

_WIDTH = 4


@dataclass
class ReferencePool:
    """The reference implementation of the pool: one record per cached block, searched linearly."""

    free: int
    references: dict[int, int] = field(default_factory=dict)  # hash -> reference count
    parents: dict[int, int | None] = field(default_factory=dict)
    released_at: dict[int, int] = field(default_factory=dict)
    ticks: int = 0

    def evictable(self) -> list[int]:
        return [value for value, count in self.references.items() if count == 0]

    def match(self, hashes: list[int]) -> int:
        count = 0
        while count < len(hashes) and hashes[count] in self.references:
            count += 1
        return count

    def can_allocate(self, hashes: list[int], total: int) -> bool:
        matched = self.match(hashes)
        idle = [value for value in self.evictable() if value not in hashes[:matched]]
        return total - matched <= self.free + len(idle)

    def allocate(self, hashes: list[int], total: int) -> None:
        matched = self.match(hashes)
        for value in hashes[:matched]:
            self.references[value] += 1
        for _ in range(total - matched):
            if self.free:
                self.free -= 1
                continue
            leaves = [value for value in self.evictable() if value not in self.parents.values()]
            oldest = min(leaves, key=lambda value: self.released_at[value])
            del self.references[oldest], self.parents[oldest]

    def register(self, value: int, parent: int | None) -> None:
        if value in self.references:
            self.references[value] += 1
            self.free += 1
        else:
            self.references[value] = 1
            self.parents[value] = parent

    def release(self, registered: list[int], private: int) -> None:
        self.free += private
        for value in reversed(registered):
            self.ticks += 1
            self.references[value] -= 1
            self.released_at[value] = self.ticks


@dataclass
class Holder:
    """A sequence of the random schedule."""

    hashes: list[int]
    tokens: list[bytes]
    ids: list[int]
    registered: int


def _random_tokens(rng: random.Random) -> npt.NDArray[np.int32]:
    """Return one of a few tokens and lengths, so that prefixes are shared, diverge and repeat."""
    return np.array([rng.randrange(2) for _ in range(_WIDTH * rng.randrange(1, 6))], dtype=np.int32)


@pytest.mark.parametrize("seed", range(60))
def test_pool_equals_the_reference_implementation(seed: int) -> None:
    """Matches, refusals, evictions and events equal those of the reference implementation."""
    rng = random.Random(seed)
    count = rng.randrange(4, 24)
    pool, reference = BlockPool(count, _WIDTH, b"salt"), ReferencePool(free=count)
    holders: list[Holder] = []
    seen: dict[int, int | None] = {}
    for _ in range(300):
        action = rng.random()
        if action < 0.4:
            tokens = _random_tokens(rng)
            hashes = chain_hashes(tokens, _WIDTH, pool.root)
            total = len(hashes) + rng.randrange(3)
            matched = pool.match(hashes)
            assert len(matched) == reference.match(hashes), f"seed={seed}"
            assert pool.can_allocate(matched, total) == reference.can_allocate(hashes, total), f"seed={seed}"
            if pool.can_allocate(matched, total):
                reference.allocate(hashes, total)
                blocks = [tokens[i : i + _WIDTH].tobytes() for i in range(0, len(tokens), _WIDTH)]
                holders.append(Holder(hashes, blocks, pool.allocate(matched, total), len(matched)))
        elif action < 0.75 and holders:
            one = rng.choice(holders)
            if one.registered < len(one.hashes):
                index = one.registered
                parent = one.hashes[index - 1] if index else None
                one.ids[index] = pool.register(one.ids[index], one.hashes[index], parent, one.tokens[index])
                reference.register(one.hashes[index], parent)
                one.registered += 1
        elif holders:
            one = holders.pop(rng.randrange(len(holders)))
            pool.release(one.ids)
            reference.release(one.hashes[: one.registered], len(one.ids) - one.registered)
        pool.assert_consistent()
        _replay(pool, seen)
        assert pool.available == reference.free + len(reference.evictable()), f"seed={seed}"
        assert seen == reference.parents, f"seed={seed}"
    for one in holders:
        pool.release(one.ids)
    pool.assert_consistent()
    assert pool.available == count, f"seed={seed}"


def _replay(pool: BlockPool, seen: dict[int, int | None]) -> None:
    for event in pool.drain_events():
        if isinstance(event, BlocksRemoved):
            for value in event.hashes:
                assert value not in seen.values(), "a parent was removed before its child"
                del seen[value]
            continue
        parent = event.parent
        for value, _ in event.blocks:
            assert parent is None or parent in seen, "a child was stored before its parent"
            seen[value], parent = parent, value
    snapshot: dict[int, int | None] = {}
    for stored in pool.snapshot():
        parent = stored.parent
        for value, _ in stored.blocks:
            assert parent is None or parent in snapshot, "snapshot has a child before its parent"
            snapshot[value], parent = parent, value
    assert snapshot == seen


def test_block_hash_is_chained_xxh3_over_little_endian_tokens() -> None:
    """An index of this engine's cache computes the same hashes from tokens and salt."""
    tokens = np.arange(2 * _WIDTH + 1, dtype=np.int32)
    root = xxhash.xxh3_64_intdigest(b"salt")
    first = xxhash.xxh3_64_intdigest(bytes.fromhex("00000000010000000200000003000000"), seed=root)
    second = xxhash.xxh3_64_intdigest(tokens[_WIDTH : 2 * _WIDTH].astype("<i4").tobytes(), seed=first)
    assert root_hash(b"salt") == root
    assert chain_hashes(tokens, _WIDTH, root) == [first, second]
    assert block_hash(tokens[_WIDTH : 2 * _WIDTH].tobytes(), first) == second


def test_without_prefix_reuse_nothing_is_registered_or_published() -> None:
    """The oracle for exactness must not reuse any block."""
    pool = BlockPool(4, _WIDTH, b"", prefix_reuse=False)
    ids = pool.allocate([], 2)
    assert pool.register(ids[0], 1, None, b"") == ids[0]
    pool.release(ids)
    assert pool.match([1]) == [] and pool.drain_events() == [] and pool.available == 4


def test_a_double_release_raises() -> None:
    """A double release is a bug; it must not free a block of another sequence."""
    pool = BlockPool(2, _WIDTH)
    ids = pool.allocate([], 1)
    pool.release(ids)
    with pytest.raises(AssertionError, match="released without a reference"):
        pool.release(ids)


def test_chained_stored_events_are_merged() -> None:
    """The blocks of a prompt are one event, so that a subscriber sees their order."""
    pool = BlockPool(4, _WIDTH)
    ids = pool.allocate([], 2)
    pool.register(ids[0], 10, None, b"a")
    pool.register(ids[1], 11, 10, b"b")
    assert pool.drain_events() == [BlocksStored(None, ((10, b"a"), (11, b"b")))]
