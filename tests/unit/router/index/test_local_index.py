"""The local index against a plain twin: sets, scanned block by block."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import cast

import pytest

from kvmesh import blocks
from kvmesh.prefix_index.events import Batch, Op, Snapshot
from services.router.index import masks
from services.router.index.local_index import BatchOutcome, LocalPrefixIndex, SnapshotLoad


def apply(local_index: LocalPrefixIndex, batch: Batch, entry_id: tuple[int, int]) -> BatchOutcome:
    """Apply a batch without a pause."""
    slices = local_index.applying(batch, entry_id)
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return cast(BatchOutcome, end.value)


class Tree:
    """A few chains that share prefixes, as block hashes."""

    def __init__(self, rng: random.Random, size: int = 60) -> None:
        self.parents: dict[int, int | None] = {}
        while len(self.parents) < size:
            parent = rng.choice([None, *self.parents, *list(self.parents)[-1:] * 200])
            self.parents[rng.getrandbits(64)] = parent

    def chain(self, value: int) -> list[int]:
        parent = self.parents[value]
        return ([] if parent is None else self.chain(parent)) + [value]

    def request(self, rng: random.Random) -> list[int]:
        known = self.chain(rng.choice(list(self.parents)))
        return known + [rng.getrandbits(64) for _ in range(rng.choice((0, 0, 1, 3)))]


class Cache:
    """A replica's true cache, in which every block has its ancestors. It numbers its published events."""

    def __init__(self, name: str, rng: random.Random, tree: Tree) -> None:
        self.name, self.rng, self.tree = name, rng, tree
        self.boot()

    def boot(self) -> None:
        self.epoch = f"boot-{self.rng.getrandbits(32)}"
        self.seq = self.told = 0
        self.held: dict[int, None] = {}

    def step(self) -> Batch:
        leaves = [v for v in self.held if all(self.tree.parents[o] != v for o in self.held)]
        if leaves and self.rng.random() < 0.4:
            op, changed = Op.REMOVED, [self.rng.choice(leaves)]
            del self.held[changed[0]]
        else:
            chain = self.tree.chain(self.rng.choice(list(self.tree.parents)))
            op, changed = Op.STORED, [v for v in chain if v not in self.held]
            self.held.update(dict.fromkeys(changed))
        self.seq += self.rng.randint(1, 3)
        batch = Batch(self.name, self.epoch, self.told, self.seq, op, tuple(changed))
        self.told = self.seq
        return batch

    def snapshot(self, stream_id: int) -> Snapshot:
        return Snapshot(self.name, self.epoch, self.seq, (stream_id, 0), blocks.pack(tuple(self.held)))

    def note(self) -> Batch:
        return Batch(self.name, self.epoch, self.told, self.seq, Op.SNAPSHOT, (), len(self.held))


def deepest(local_index: LocalPrefixIndex, hashes: Sequence[int]) -> int:
    """Return the leading blocks held by the deepest replica."""
    return max(local_index.matched(hashes).values(), default=0)


def depth(request: list[int], held: set[int]) -> int:
    for index, value in enumerate(request):
        if value not in held:
            return index
    return len(request)


class Twin:
    """Caches that publish their changes over a channel with losses, repeats and delays, and their true contents."""

    def __init__(self, seed: int, local_index: LocalPrefixIndex) -> None:
        self.rng = rng = random.Random(seed)
        self.tree = Tree(rng)
        self.local_index = local_index
        names = ("a", "b", "c", "d", "e", "f", "g", "h", "i")[: rng.randint(1, 9)]
        self.caches = {name: Cache(name, rng, self.tree) for name in names}
        self.in_flight: dict[str, Counter[int]] = {name: Counter() for name in names}
        self.dispatched: list[tuple[str, list[int]]] = []
        self.dirty = set(names)
        """Replicas with an open gap, and those without a lease."""
        self.loads: dict[str, tuple[SnapshotLoad, Snapshot, list[tuple[int, Batch]]]] = {}
        """Snapshots in loading, and the entries of their replicas since."""
        self.entry = 0
        for name in names:
            local_index.add(name)

    def step(self) -> None:
        """Do one random thing."""
        self.entry += 1
        rng, name = self.rng, self.rng.choice(list(self.caches))
        kind = rng.random()
        if kind < 0.45:
            batch = self.caches[name].step()
            if rng.random() < 0.08:
                self.dirty.add(name)  # lost on the way
                self.cancel(name)
            else:
                for _ in range(rng.choice((1, 1, 1, 2))):
                    self.tell(batch)
        elif kind < 0.52:
            self.tell(self.caches[name].note())
        elif kind < 0.58:
            self.cancel(name)
            snapshot = self.caches[name].snapshot(self.entry)
            load = self.local_index.begin_load(snapshot.head)
            assert load is not None
            self.loads[name] = load, snapshot, []
        elif kind < 0.66 and self.loads:
            self.go_on(rng.choice(list(self.loads)))
        elif kind < 0.68:
            self.caches[name].boot()
            self.dirty.add(name)
            self.cancel(name)
        elif kind < 0.70:
            self.drop(name)
        elif kind < 0.85:
            request = self.tree.request(rng)
            self.local_index.add_in_flight(name, request)
            self.in_flight[name].update(request)
            self.dispatched.append((name, request))
        elif self.dispatched:
            other, request = self.dispatched.pop(rng.randrange(len(self.dispatched)))
            self.local_index.remove_in_flight(other, request)
            self.in_flight[other] -= Counter(request)

    def tell(self, batch: Batch) -> None:
        """Publish an entry, which waits while the snapshot of its replica is being loaded."""
        name = batch.replica
        if name in self.loads:
            self.loads[name][2].append((self.entry, batch))
            return
        outcome = apply(self.local_index, batch, (self.entry, 0))
        if batch.op is Op.SNAPSHOT:
            assert (outcome is BatchOutcome.RELOAD) == (name in self.dirty)
        else:
            assert outcome is not BatchOutcome.RELOAD or name in self.dirty

    def go_on(self, name: str) -> None:
        """Load more of a snapshot; at its end, apply the entries that waited."""
        load, snapshot, waiting = self.loads[name]
        hashes = blocks.unpack(snapshot.packed)[load.position :]
        if hashes and self.rng.random() < 0.8:
            assert self.local_index.take(load, hashes[: self.rng.randint(1, 20)])
            return
        while load.position < snapshot.block_count:
            self.local_index.take(load, blocks.unpack(snapshot.packed)[load.position :][:20])
        self.local_index.end_load(load)
        del self.loads[name]
        self.dirty.discard(name)
        for entry, batch in waiting:
            assert apply(self.local_index, batch, (entry, 0)) is not BatchOutcome.RELOAD

    def cancel(self, name: str) -> None:
        """Cancel a load. The gap that it would have closed stays open."""
        if name in self.loads:
            load, _, waiting = self.loads.pop(name)
            self.local_index.cancel_load(load)
            self.dirty.update({name} if waiting else ())
            if self.local_index.position_of(name)[0] != self.caches[name].epoch:
                self.dirty.add(name)

    def drop(self, name: str) -> None:
        """Drop a replica, and add another one of its name."""
        self.local_index.drop(name)
        if name in self.loads:
            load, _, _ = self.loads.pop(name)
            assert not self.local_index.take(load, [1])
            self.local_index.end_load(load)
        self.local_index.add(name)
        self.dirty.add(name)
        self.in_flight[name].clear()
        self.dispatched = [(other, request) for other, request in self.dispatched if other != name]

    def true_depths(self, request: list[int]) -> dict[str, int]:
        """Return the depths that a lookup should find, of replicas without an open gap and without waiting entries."""
        behind = {name for name, (_, _, waiting) in self.loads.items() if waiting}
        return {
            name: depth(request, set(cache.held) | set(self.in_flight[name]))
            for name, cache in self.caches.items()
            if name not in self.dirty | behind
        }


@pytest.mark.parametrize("seed", range(40))
def test_depths_are_exact_under_events_losses_duplicates_and_reboots(seed: int) -> None:
    """A replica without a gap is exact, in any order of events, losses, repeats, reboots and slices of reloads."""
    local_index = LocalPrefixIndex()
    twin = Twin(seed, local_index)
    maintain: Iterator[None] = iter(())
    request = twin.tree.request(twin.rng)
    for index in range(300):
        local_index.groups(request)
        twin.step()
        assert local_index.groups(request) == local_index.groups(list(request)), (
            "an old answer is given again"
        )
        if next(maintain, 0) is not None and local_index.needs_maintenance and twin.rng.random() < 0.3:
            maintain = local_index.maintain()
        for _ in range(twin.rng.choice((0, 0, 50))):
            next(maintain, None)
        if index % 5 == 0:
            local_index.assert_consistent()
        request = twin.tree.request(twin.rng)
        found = local_index.matched(request)
        for name, wanted in twin.true_depths(request).items():
            assert found.get(name, 0) == wanted, f"{seed=}"
        groups = local_index.groups(request)
        assert [group.depth for group in groups] == sorted(set(found.values()), reverse=True)
        for name, its_depth in found.items():
            masks = [group.mask for group in groups if group.mask & local_index.bit_of(name)]
            assert masks == [group.mask for group in groups if group.depth == its_depth]


@pytest.mark.parametrize("seed", range(40))
def test_a_bounded_index_promises_no_block_that_is_not_there(seed: int) -> None:
    """Above its bound the index finds less than there is, never more. The missing blocks cause no reload."""
    rng = random.Random(
        f"bound {seed}"
    )  # not the twin's generator: its tree's blocks would come again as new ones
    bound = rng.choice((8, 20, 40))
    local_index = LocalPrefixIndex(bound)
    twin = Twin(seed, local_index)
    for index in range(300):
        twin.step()
        if rng.random() < 0.5 or local_index.is_far_over:
            while local_index.needs_maintenance:
                list(local_index.maintain())
            assert local_index.block_count <= bound, f"{seed=}"
        if index % 5 == 0:
            local_index.assert_consistent()
        request = twin.tree.request(rng)
        found = local_index.matched(request)
        for name, wanted in twin.true_depths(request).items():
            assert found.get(name, 0) <= wanted, f"{seed=}"
    assert local_index.evicted_block_total or bound > 20


def keep_within(local_index: LocalPrefixIndex) -> None:
    while local_index.needs_maintenance:
        list(local_index.maintain())


def test_used_blocks_outlive_unused_ones() -> None:
    """Chains that requests keep hitting stay whole, however many blocks come after them; unused chains are evicted."""
    rng = random.Random(5)
    chains = [[rng.getrandbits(64) for _ in range(30)] for _ in range(100)]
    local_index = LocalPrefixIndex(4000)
    local_index.add("a")
    packed = blocks.pack([value for chain in chains for value in chain])
    list(local_index.load(Snapshot("a", "e", 1, (1, 0), packed)))
    for _ in range(400):
        local_index.store("a", [rng.getrandbits(64) for _ in range(30)])
        local_index.repair("a", chains[rng.randrange(10)], 30)
        if local_index.is_far_over:
            keep_within(local_index)
    assert [deepest(local_index, chain) for chain in chains[:10]] == [30] * 10
    assert sum(deepest(local_index, chain) for chain in chains[10:]) < 0.05 * 90 * 30
    local_index.assert_consistent()


def test_of_snapshots_beyond_the_bound_every_replica_keeps_the_first_blocks() -> None:
    """A replica that is loaded late keeps its share too. Ancestors stay, so that the kept blocks can be found."""
    rng = random.Random(6)
    local_index = LocalPrefixIndex(4000)
    caches = {
        f"r{index}": [[rng.getrandbits(64) for _ in range(20)] for _ in range(100)] for index in range(8)
    }
    for name, chains in caches.items():
        local_index.add(name)
        packed = blocks.pack([chain[at] for at in range(20) for chain in chains])
        for _ in local_index.load(Snapshot(name, "e", 1, (1, 0), packed)):
            if local_index.is_far_over:
                keep_within(local_index)
    keep_within(local_index)
    assert min(local_index.blocks_of(name) for name in caches) >= 4000 / 8 / 2
    found = sum(deepest(local_index, chain) for chains in caches.values() for chain in chains)
    assert found >= 0.7 * local_index.block_count
    local_index.assert_consistent()


def test_an_old_entry_is_not_applied_behind_its_snapshot() -> None:
    """Entries up to the snapshot's position in the stream are skipped, even those of another epoch."""
    local_index = LocalPrefixIndex()
    local_index.add("a")
    list(local_index.load(Snapshot("a", "new", 5, (10, 0), blocks.pack((1, 2)))))
    assert apply(local_index, Batch("a", "old", 0, 9, Op.STORED, (3,)), (9, 7)) is BatchOutcome.STALE
    assert apply(local_index, Batch("a", "new", 4, 5, Op.STORED, (3,)), (11, 0)) is BatchOutcome.STALE
    assert apply(local_index, Batch("a", "new", 5, 6, Op.STORED, (3,)), (11, 0)) is BatchOutcome.APPLIED
    assert apply(local_index, Batch("a", "newer", 0, 1, Op.STORED, (4,)), (12, 0)) is BatchOutcome.RELOAD
    assert apply(local_index, Batch("nobody", "e", 0, 1, Op.STORED, (4,)), (12, 0)) is BatchOutcome.STALE
    assert local_index.matched([1, 2, 3]) == {"a": 3}


def test_a_drifted_count_asks_for_a_reload() -> None:
    """Bits that no event would ever clear are found by the audit in each snapshot's batch."""
    local_index = LocalPrefixIndex()
    local_index.add("a")
    list(local_index.load(Snapshot("a", "e", 5, (1, 0), blocks.pack(tuple(range(100))))))
    local_index.store("a", list(range(1000, 1016)))
    assert apply(local_index, Batch("a", "e", 5, 5, Op.SNAPSHOT, (), 100), (2, 0)) is BatchOutcome.APPLIED
    local_index.store("a", [2000])
    assert apply(local_index, Batch("a", "e", 5, 5, Op.SNAPSHOT, (), 100), (3, 0)) is BatchOutcome.RELOAD


def test_real_hits_correct_the_index() -> None:
    """A hit sets missing blocks, clears absent ones, counts both, and leaves no false depth elsewhere."""
    local_index = LocalPrefixIndex()
    local_index.add("a")
    local_index.add("b")
    local_index.store("a", [1, 2, 3, 4])
    local_index.store("b", [1, 2])
    assert local_index.repair("a", [1, 2, 3, 4], 4) == 0
    assert local_index.repair("b", [1, 2, 3, 4], 3) == 1
    assert local_index.matched([1, 2, 3, 4]) == {"a": 4, "b": 3}
    local_index.store("a", [5])  # child of 2, on the chain 1 2 5
    assert local_index.repair("a", [1, 2, 3, 4], 1) == 3
    assert local_index.matched([1, 2, 5]) == {"a": 1, "b": 2}
    assert local_index.repair("a", [1, 2, 3, 4], 1, held=4) == 0
    assert local_index.matched([1, 2, 3, 4]) == {"a": 4, "b": 3}
    assert local_index.repaired_block_total == 4
    local_index.assert_consistent()


def test_a_cleared_block_in_the_middle_of_other_chains_is_not_jumped_over() -> None:
    """After a hit showed a missing ancestor, long chains are scanned, not bisected, until the next snapshot."""
    local_index = LocalPrefixIndex()
    local_index.add("a")
    chain, branch = list(range(1, 40)), [*range(1, 20), *range(100, 120)]
    local_index.store("a", [*chain, *branch[19:]])
    local_index.repair("a", chain, 10)
    assert local_index.matched(branch) == {"a": 10}
    list(local_index.load(Snapshot("a", "e", 1, (1, 0), blocks.pack(tuple(branch)))))
    assert local_index.matched(branch) == {"a": 39}


def test_content_of_an_engine_that_is_gone_answers_nothing_while_the_new_is_loaded() -> None:
    """A load of another epoch hides the old blocks at once, a load of the same epoch only when it is complete."""
    local_index = LocalPrefixIndex()
    local_index.add("a")
    list(local_index.load(Snapshot("a", "one", 1, (1, 0), blocks.pack((1, 2, 3)))))
    fresh = blocks.pack(tuple(range(10_000, 20_000)))
    same = local_index.load(Snapshot("a", "one", 2, (2, 0), fresh))
    next(same)
    assert local_index.matched([1, 2, 3]) == {"a": 3}
    list(same)
    assert local_index.matched([1, 2, 3]) == {}
    other = local_index.load(Snapshot("a", "two", 1, (3, 0), blocks.pack((1, 2))))
    next(other)
    assert local_index.matched([10_000]) == {}
    list(other)
    assert local_index.matched([1, 2, 3]) == {"a": 2}
    local_index.assert_consistent()


def test_a_dropped_replicas_bit_is_given_away_only_after_the_sweep() -> None:
    """A new replica never inherits blocks of a dropped one, swept or not."""
    local_index = LocalPrefixIndex()
    for name in ("a", "b"):
        local_index.add(name)
        local_index.store(name, range(1, 500))
    local_index.drop("a")
    local_index.add("c")
    assert local_index.matched([1, 2]) == {"b": 2}
    for _ in local_index.maintain():
        assert local_index.matched([1, 2]) == {"b": 2}
    assert not local_index.needs_maintenance
    local_index.add("d")
    assert local_index.matched([1, 2]) == {"b": 2}
    local_index.drop("b")
    list(local_index.maintain())
    assert local_index.block_count == 0
    local_index.assert_consistent()


def test_a_replica_dropped_while_it_loads_leaves_nothing() -> None:
    """A load that is overtaken by a drop ends, and a sweep removes its blocks."""
    local_index = LocalPrefixIndex()
    local_index.add("a")
    local_index.store("a", [1])
    loading = local_index.load(Snapshot("a", "", 5, (1, 0), blocks.pack(tuple(range(5000)))))
    next(loading)
    local_index.drop("a")
    assert list(loading) == []
    list(local_index.maintain())
    assert local_index.block_count == 0
    local_index.add("b")
    assert local_index.blocks_of("b") == 0
    local_index.assert_consistent()


def test_masks_that_were_seen_once_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """With replicas that come to share blocks in all combinations, the number of interned masks is bounded."""
    monkeypatch.setattr(masks, "MASKS_MIN", 50)
    rng = random.Random(4)
    local_index = LocalPrefixIndex()
    for index in range(9):
        local_index.add(f"idle{index}")  # CPython keeps the integers up to 256 itself
    names = [f"p{index}" for index in range(12)]
    held: dict[str, set[int]] = {name: set() for name in names}
    for name in names:
        local_index.add(name)
    for _ in range(3000):
        name, value = rng.choice(names), rng.randrange(20)
        if value in held[name]:
            held[name].remove(value)
            assert local_index.remove(name, [value]) == 1
        else:
            held[name].add(value)
            assert local_index.store(name, [value]) == 1
        if local_index.needs_maintenance:
            list(local_index.maintain())
        used = {id(mask) for shard in local_index._table.shards for mask in shard.values()}
        assert len(local_index._table.masks.known) <= 50
        assert used <= {id(mask) for mask in local_index._table.masks.known}, "equal masks are not shared"
    assert {name: local_index.blocks_of(name) for name in names} == {name: len(held[name]) for name in names}
    local_index.assert_consistent()
