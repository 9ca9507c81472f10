"""The mirror against a dumb twin: plain sets, scanned block by block."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvmesh import blocks
from kvmesh.prefix_index.events import Batch, Op, Snapshot
from services.router import masks
from services.router.mirror import Outcome, PrefixMirror


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
    """A replica's true cache: closed, leaf first out; it numbers what it publishes."""

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


def depth(request: list[int], held: set[int]) -> int:
    for index, value in enumerate(request):
        if value not in held:
            return index
    return len(request)


@pytest.mark.parametrize("seed", range(40))
def test_depths_are_exact_under_events_losses_duplicates_and_reboots(seed: int) -> None:
    """Whatever order events, losses, repeats, reboots and reloads come in, a replica without open gap is exact."""
    rng = random.Random(seed)
    tree = Tree(rng)
    caches = {
        name: Cache(name, rng, tree)
        for name in ("a", "b", "c", "d", "e", "f", "g", "h", "i")[: rng.randint(1, 9)]
    }
    mirror = PrefixMirror()
    overlay: dict[str, Counter[int]] = {name: Counter() for name in caches}
    dispatched: list[tuple[str, list[int]]] = []
    dirty, hidden = set(caches), set[str]()
    for name in caches:
        mirror.add(name)
    for entry in range(1, 250):
        name = rng.choice(list(caches))
        cache = caches[name]
        kind = rng.random()
        if kind < 0.45:
            batch = cache.step()
            if rng.random() < 0.08:
                dirty.add(name)  # lost on the way
            else:
                for _ in range(rng.choice((1, 1, 1, 2))):
                    outcome = mirror.apply(batch, (entry, 0))
                    assert outcome is not Outcome.RELOAD or name in dirty, f"{seed=}"
        elif kind < 0.52:
            outcome = mirror.apply(cache.note(), (entry, 0))
            assert (outcome is Outcome.RELOAD) == (name in dirty), f"{seed=}"
        elif kind < 0.62:
            for _ in mirror.load(cache.snapshot(entry)):
                mirror.matched(tree.request(rng))
            dirty.discard(name)
            if rng.random() < 0.5:
                for _ in mirror.upkeep():
                    pass
        elif kind < 0.64:
            cache.boot()
            dirty.add(name)
        elif kind < 0.66:
            mirror.drop(name)
            mirror.add(name)
            dirty.add(name)
            hidden.discard(name)
            overlay[name].clear()
            dispatched = [(other, request) for other, request in dispatched if other != name]
        elif kind < 0.70:
            hidden.symmetric_difference_update({name})
            mirror.set_live(name, name not in hidden)
        elif kind < 0.85:
            request = tree.request(rng)
            mirror.expect(name, request)
            overlay[name].update(request)
            dispatched.append((name, request))
        elif dispatched:
            other, request = dispatched.pop(rng.randrange(len(dispatched)))
            mirror.unexpect(other, request)
            overlay[other] -= Counter(request)
        mirror.assert_consistent()
        request = tree.request(rng)
        found = mirror.matched(request)
        assert hidden.isdisjoint(found)
        for other, its_cache in caches.items():
            if other not in dirty and other not in hidden:
                held = set(its_cache.held) | set(overlay[other])
                assert found.get(other, 0) == depth(request, held), f"{seed=}"


def test_an_old_entry_is_not_applied_behind_its_snapshot() -> None:
    """Entries up to the snapshot's place in the stream are history, even of another epoch."""
    mirror = PrefixMirror()
    mirror.add("a")
    list(mirror.load(Snapshot("a", "new", 5, (10, 0), blocks.pack((1, 2)))))
    assert mirror.apply(Batch("a", "old", 0, 9, Op.STORED, (3,)), (9, 7)) is Outcome.STALE
    assert mirror.apply(Batch("a", "new", 4, 5, Op.STORED, (3,)), (11, 0)) is Outcome.STALE
    assert mirror.apply(Batch("a", "new", 5, 6, Op.STORED, (3,)), (11, 0)) is Outcome.APPLIED
    assert mirror.apply(Batch("a", "newer", 0, 1, Op.STORED, (4,)), (12, 0)) is Outcome.RELOAD
    assert mirror.apply(Batch("nobody", "e", 0, 1, Op.STORED, (4,)), (12, 0)) is Outcome.STALE
    assert mirror.matched([1, 2, 3]) == {"a": 3}


def test_a_drifted_count_asks_for_a_reload() -> None:
    """Bits that no event would ever clear are found by the audit in each snapshot's note."""
    mirror = PrefixMirror()
    mirror.add("a")
    list(mirror.load(Snapshot("a", "e", 5, (1, 0), blocks.pack(tuple(range(100))))))
    mirror.store("a", list(range(1000, 1016)))
    assert mirror.apply(Batch("a", "e", 5, 5, Op.SNAPSHOT, (), 100), (2, 0)) is Outcome.APPLIED
    mirror.store("a", [2000])
    assert mirror.apply(Batch("a", "e", 5, 5, Op.SNAPSHOT, (), 100), (3, 0)) is Outcome.RELOAD


def test_real_hits_correct_the_index() -> None:
    """A hit sets what was missing, clears what was not there, counts both, and leaves no false depth elsewhere."""
    mirror = PrefixMirror()
    mirror.add("a")
    mirror.add("b")
    mirror.store("a", [1, 2, 3, 4])
    mirror.store("b", [1, 2])
    assert mirror.heal("a", [1, 2, 3, 4], 4) == 0
    assert mirror.heal("b", [1, 2, 3, 4], 3) == 1
    assert mirror.matched([1, 2, 3, 4]) == {"a": 4, "b": 3}
    mirror.store("a", [5])  # child of 2, on the chain 1 2 5
    assert mirror.heal("a", [1, 2, 3, 4], 1) == 3
    assert mirror.matched([1, 2, 5]) == {"a": 1, "b": 2}
    assert mirror.heal("a", [1, 2, 3, 4], 1, held=4) == 0
    assert mirror.matched([1, 2, 3, 4]) == {"a": 4, "b": 3}
    assert mirror.healed_block_total == 4
    mirror.assert_consistent()


def test_a_cleared_block_in_the_middle_of_other_chains_is_not_jumped_over() -> None:
    """After a hit showed that an ancestor is missing, long chains are scanned, not bisected, until the next snapshot."""
    mirror = PrefixMirror()
    mirror.add("a")
    chain, branch = list(range(1, 40)), [*range(1, 20), *range(100, 120)]
    mirror.store("a", [*chain, *branch[19:]])
    mirror.heal("a", chain, 10)
    assert mirror.matched(branch) == {"a": 10}
    list(mirror.load(Snapshot("a", "e", 1, (1, 0), blocks.pack(tuple(branch)))))
    assert mirror.matched(branch) == {"a": 39}


def test_content_of_an_engine_that_is_gone_answers_nothing_while_the_new_is_loaded() -> None:
    """A load of another epoch hides the old blocks at once, one of the same epoch only when it is complete."""
    mirror = PrefixMirror()
    mirror.add("a")
    list(mirror.load(Snapshot("a", "one", 1, (1, 0), blocks.pack((1, 2, 3)))))
    fresh = blocks.pack(tuple(range(10_000, 20_000)))
    same = mirror.load(Snapshot("a", "one", 2, (2, 0), fresh))
    next(same)
    assert mirror.matched([1, 2, 3]) == {"a": 3}
    list(same)
    assert mirror.matched([1, 2, 3]) == {}
    other = mirror.load(Snapshot("a", "two", 1, (3, 0), blocks.pack((1, 2))))
    next(other)
    assert mirror.matched([10_000]) == {}
    list(other)
    assert mirror.matched([1, 2, 3]) == {"a": 2}
    mirror.assert_consistent()


def test_a_dropped_replicas_bit_is_given_away_only_after_the_sweep() -> None:
    """A new replica never inherits blocks of a dead one, swept or not."""
    mirror = PrefixMirror()
    for name in ("a", "b"):
        mirror.add(name)
        mirror.store(name, range(1, 500))
    mirror.drop("a")
    mirror.add("c")
    assert mirror.matched([1, 2]) == {"b": 2}
    for _ in mirror.upkeep():
        assert mirror.matched([1, 2]) == {"b": 2}
    assert not mirror.needs_upkeep
    mirror.add("d")
    assert mirror.matched([1, 2]) == {"b": 2}
    mirror.drop("b")
    list(mirror.upkeep())
    assert mirror.block_count == 0
    mirror.assert_consistent()


def test_a_replica_dropped_while_it_loads_leaves_nothing() -> None:
    """A load that is overtaken by a drop ends, and a sweep removes what it had set."""
    mirror = PrefixMirror()
    mirror.add("a")
    mirror.store("a", [1])
    loading = mirror.load(Snapshot("a", "", 5, (1, 0), blocks.pack(tuple(range(5000)))))
    next(loading)
    mirror.drop("a")
    assert list(loading) == []
    list(mirror.upkeep())
    assert mirror.block_count == 0
    mirror.add("b")
    assert mirror.blocks_of("b") == 0
    mirror.assert_consistent()


def test_masks_that_were_seen_once_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under many replicas that come to share blocks in all combinations, what is kept beside the blocks is bounded."""
    monkeypatch.setattr(masks, "MASKS_MIN", 50)
    rng = random.Random(4)
    mirror = PrefixMirror()
    for index in range(9):
        mirror.add(f"idle{index}")  # Python keeps the integers up to 256 itself
    names = [f"p{index}" for index in range(12)]
    held: dict[str, set[int]] = {name: set() for name in names}
    for name in names:
        mirror.add(name)
    for _ in range(3000):
        name, value = rng.choice(names), rng.randrange(20)
        if value in held[name]:
            held[name].remove(value)
            assert mirror.remove(name, [value]) == 1
        else:
            held[name].add(value)
            assert mirror.store(name, [value]) == 1
        if mirror.needs_upkeep:
            list(mirror.upkeep())
        used = {id(mask) for shard in mirror._table.shards for mask in shard.values()}
        assert len(mirror._table.masks.known) <= 50
        assert used <= {id(mask) for mask in mirror._table.masks.known}, "equal masks are not shared"
    assert {name: mirror.blocks_of(name) for name in names} == {name: len(held[name]) for name in names}
    mirror.assert_consistent()
