"""Believed blocks of engines without KV events: against a plain twin, and beside an engine's real block pool."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

from engines.reference.block_pool import BlockPool, chain_hashes
from kvmesh import blocks
from kvmesh.prefix_index.events import Batch, Op, Snapshot
from services.router.index import believed_blocks
from services.router.index.believed_blocks import BelievedBlocks
from services.router.index.local_index import BatchOutcome, LocalPrefixIndex
from tests.unit.router.index.test_local_index import Tree, apply

BLOCK = 4
NAME = "decode-0"


class Twin:
    """The same belief as one list of blocks, a block at a time. Unnamed blocks have negative names."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.order: OrderedDict[int, None] = OrderedDict()
        self._unnamed = 0

    def use(self, hashes: Sequence[int], unnamed: int) -> None:
        names = range(-self._unnamed - unnamed, -self._unnamed)
        self._unnamed += unnamed
        for value in (*names, *reversed(hashes)):
            self.order[value] = None
            self.order.move_to_end(value)

    def evict(self) -> list[int]:
        gone = [self.order.popitem(last=False)[0] for _ in range(len(self.order) - self.limit)]
        return [value for value in gone if value >= 0]


@pytest.mark.parametrize("seed", range(20))
def test_the_oldest_blocks_go_first_and_leaves_before_parents(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any uses, at one time or at several, with unnamed blocks and forgotten ones, leave what a list of blocks leaves."""
    monkeypatch.setattr(believed_blocks, "STALE_SPARE", 8)
    monkeypatch.setattr(believed_blocks, "SHARD_BLOCKS", 16)
    rng = random.Random(seed)
    tree, limit = Tree(rng), rng.choice((1, 7, 40, 100))
    believed, twin = BelievedBlocks(limit), Twin(limit)
    now_s = 0.0
    for _ in range(300):
        now_s += rng.choice((0.0, 0.0, 1.0))
        request = tree.request(rng)
        if rng.random() < 0.1:
            believed.discard(request[::-1])
            for value in request:
                twin.order.pop(value, None)
            continue
        unnamed = rng.choice((0, 0, 2))
        believed.use(request, now_s, unnamed)
        twin.use(request, unnamed)
        assert believed.evict() == twin.evict()
        believed.assert_consistent()
        assert len(believed) == len(twin.order) <= limit
        assert list(believed.oldest_first()) == [value for value in twin.order if value >= 0]


def test_stale_uses_do_not_accumulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt that comes a thousand times is filed a few times, not a thousand times."""
    monkeypatch.setattr(believed_blocks, "STALE_SPARE", 8)
    believed = BelievedBlocks(1000)
    others = [list(range(at, at + 10)) for at in range(1000, 1400, 10)]
    for at in range(1000):
        believed.use(range(50), float(at))
        believed.use(others[at % 40], float(at))
        believed.evict()
    believed.assert_consistent()
    filed = sum(len(use.blocks) for use in (*believed._tidied, *believed._uses))
    assert len(believed) == 450
    assert filed <= 3 * 450


class Engine:
    """A real block pool that runs prompts, each until it is ended. A prompt's last token is always computed."""

    def __init__(self, block_count: int) -> None:
        self.pool = BlockPool(block_count, BLOCK)

    def start(self, tokens: list[int], room: int) -> tuple[list[int], int] | None:
        """Run a prompt. Return its blocks and how many were cached; None if it does not fit."""
        hashes = self.hashes(tokens)
        matched = self.pool.match(hashes[: (len(tokens) - 1) // BLOCK])
        total = -(-(len(tokens) + room) // BLOCK)
        if not self.pool.can_allocate(matched, total):
            return None
        held = self.pool.allocate(matched, total)
        self.register(tokens, held)
        return held, len(matched)

    def register(self, tokens: list[int], held: list[int]) -> None:
        parent = None
        for at, value in enumerate(self.hashes(tokens)):
            held[at] = self.pool.register(held[at], value, parent, b"")
            parent = value

    def end(self, tokens: list[int], held: list[int]) -> None:
        """End a request with all its tokens. The last one was never computed."""
        self.register(tokens[:-1], held)
        self.pool.release(held)

    def hashes(self, tokens: list[int]) -> list[int]:
        return chain_hashes(np.array(tokens, np.int32), BLOCK, self.pool.root)


class Talks:
    """Conversations: the prompt of a turn is the turn before, its answer, and more."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._system = [1] * (3 * BLOCK)
        self._talks = [list(self._system) for _ in range(12)]

    def prompt(self) -> tuple[int, list[int]]:
        rng = self._rng
        number = rng.randrange(len(self._talks))
        if len(self._talks[number]) > 30 * BLOCK or rng.random() < 0.1:
            self._talks[number] = list(self._system)
        return number, self._talks[number] + [rng.randrange(2, 1000) for _ in range(rng.randrange(1, 40))]

    def answered(self, number: int, tokens: list[int]) -> None:
        self._talks[number] = tokens


class Running(NamedTuple):
    """A request that the engine runs."""

    talk: int
    whole: list[int]
    """Its prompt and its output."""
    hashes: list[int]
    held: list[int]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("own_share", (1.0, 0.5, 0.0))
def test_a_real_block_pool_is_followed_by_hits_alone(seed: int, own_share: float) -> None:
    """Beside a block pool under eviction, believed blocks stay within its size, and few of them are wrong.

    `own_share`: share of the requests with an end that this router sees. A peer router sees the end of the others.
    """
    rng = random.Random(f"{seed} {own_share}")
    size = rng.choice((60, 120, 300))
    engine, talks, index = Engine(size), Talks(rng), LocalPrefixIndex()
    index.add(NAME)
    index.believe(NAME, size, "boot")
    running: list[Running] = []
    promised = wrong = found = 0
    for step in range(900):
        now_s = float(step)
        talk, tokens = talks.prompt()
        whole = tokens + [rng.randrange(2, 1000) for _ in range(rng.randrange(1, 20))]
        hashes = engine.hashes(tokens)
        started = engine.start(tokens, len(whole) - len(tokens))
        if started is not None:
            held, cached = started
            expected = min(index.matched(hashes).get(NAME, 0), (len(tokens) - 1) // BLOCK)
            promised, found, wrong = promised + expected, found + cached, wrong + max(0, expected - cached)
            index.repair(NAME, hashes, cached, len(hashes), at_s=now_s + 0.5, dispatched_s=now_s)
            running.append(Running(talk, whole, hashes, held))
        while running and (started is None or len(running) > 3 or rng.random() < 0.5):
            ended = running.pop(rng.randrange(len(running)))
            engine.end(ended.whole, ended.held)
            talks.answered(ended.talk, ended.whole)
            if rng.random() < own_share:
                unnamed = (len(ended.whole) - 1) // BLOCK - len(ended.hashes)
                index.use(NAME, ended.hashes, max(0, unnamed), now_s + 0.75)
            if started is None:
                break
        assert index.blocks_of(NAME) <= size
        if step % 50 == 0:
            index.assert_consistent()
            engine.pool.assert_consistent()
    index.assert_consistent()
    assert wrong <= 0.1 * promised
    # The router learns the hashes of an output with the next turn, so the last output of a conversation is never promised.
    assert promised - wrong >= 0.8 * found
    index.drop(NAME)
    for _ in index.maintain():
        pass
    assert index.block_count == 0
    assert not index.matched(hashes)


def chain(length: int, *, start: int = 1) -> list[int]:
    """Return hashes of a prompt with `length` blocks."""
    return list(range(start << 56, (start << 56) + length))


def believing(limit: int = 100, boot_id: str = "boot") -> LocalPrefixIndex:
    index = LocalPrefixIndex()
    index.add(NAME)
    index.believe(NAME, limit, boot_id)
    return index


def ran(
    index: LocalPrefixIndex, hashes: list[int], cached: int, at_s: float, dispatched_s: float | None = None
) -> None:
    """Report a prompt that was dispatched at `dispatched_s`, by default at once."""
    dispatched_s = at_s if dispatched_s is None else dispatched_s
    index.repair(NAME, hashes, cached, len(hashes), at_s=at_s, dispatched_s=dispatched_s)


def test_a_wrong_hit_takes_older_blocks_too() -> None:
    """A missing block shows that all blocks with an older use are gone, and that less room is left; newer blocks stay."""
    index = believing()
    old, missing, new = chain(10), chain(10, start=2), chain(10, start=3)
    for at, hashes in enumerate((old, missing, new)):
        ran(index, hashes, int(at > 0), float(at))
    ran(index, missing, 3, 5.0)
    assert index.matched(old) == {}
    assert index.matched(missing) == {NAME: 10}
    assert index.matched(new) == {NAME: 10}
    index.assert_consistent()
    for start in range(4, 20):
        ran(index, chain(10, start=start), 0, float(start))
    assert 10 <= index.blocks_of(NAME) < 40
    index.assert_consistent()


def test_a_miss_that_the_dispatch_could_not_know_refutes_nothing() -> None:
    """Two prompts of one batch with the same prefix both miss it: the second was dispatched before the first had run."""
    index = believing()
    ran(index, chain(10), 0, 1.0)
    ran(index, chain(10), 10, 2.0)
    ran(index, chain(10, start=2), 0, 4.0, dispatched_s=3.0)
    ran(index, chain(10, start=2), 0, 4.5, dispatched_s=3.0)
    assert index.matched(chain(10)) == index.matched(chain(10, start=2)) == {NAME: 10}


def test_an_engine_that_reports_no_hits_is_not_judged() -> None:
    """An engine without performance metrics reports zero cached blocks for ever. Its size alone bounds its belief."""
    index = believing()
    ran(index, chain(10, start=3), 0, 0.0)
    for at in range(1, 5):
        ran(index, chain(10), 0, float(at))
        ran(index, chain(10, start=2), 0, at + 0.5)
    assert index.blocks_of(NAME) == 30


def test_an_unexpected_hit_makes_room() -> None:
    """Hits beyond the believed blocks show a larger cache than assumed after a wrong hit, up to the size of the engine."""
    index = believing(limit=30)
    ran(index, chain(20), 1, 1.0)
    ran(index, chain(20), 0, 2.0)  # wrong: 20 blocks are believed
    ran(index, chain(20, start=2), 19, 3.0)
    ran(index, chain(20, start=3), 19, 4.0)
    assert index.blocks_of(NAME) == 30
    index.assert_consistent()


def swept(index: LocalPrefixIndex) -> int:
    """Return the blocks of the index after its maintenance."""
    for _ in index.maintain():
        pass
    index.assert_consistent()
    return index.block_count


def test_a_new_boot_begins_with_nothing() -> None:
    """A new boot id, or another number of blocks, forgets what was believed. Equal reports and a missing id do not."""
    index = believing()
    ran(index, chain(10), 0, 1.0)
    index.add_in_flight(NAME, chain(5, start=2))
    for blocks_max, boot_id in ((100, "boot"), (100, "")):
        index.believe(NAME, blocks_max, boot_id)
        assert index.matched(chain(10)) == {NAME: 10}
    index.doubt(NAME)  # its boot id would show a restart
    assert index.matched(chain(10)) == {NAME: 10}
    index.believe(NAME, 100, "boot-2")
    assert index.matched(chain(10)) == {}
    assert index.matched(chain(5, start=2)) == {NAME: 5}
    index.remove_in_flight(NAME, chain(5, start=2))
    assert swept(index) == 0
    ran(index, chain(10), 0, 2.0)
    index.believe(NAME, 50, "boot-2")
    assert index.matched(chain(10)) == {} and swept(index) == 0


def test_an_engine_without_boot_id_is_doubted() -> None:
    """Without a boot id, each moment in which the engine may have restarted forgets what was believed."""
    index = believing(boot_id="")
    ran(index, chain(10), 0, 1.0)
    index.believe(NAME, 100, "")
    assert index.matched(chain(10)) == {NAME: 10}
    index.doubt(NAME)
    assert index.matched(chain(10)) == {} and swept(index) == 0
    ran(index, chain(10), 0, 2.0)
    index.believe(NAME, 100, "boot")  # it has one after all
    assert index.matched(chain(10)) == {NAME: 10}


def test_a_replica_that_leaves_and_returns_has_nothing() -> None:
    """A dropped replica leaves no block. Its calls are harmless, and it returns as one with events."""
    index = believing()
    ran(index, chain(10), 0, 1.0)
    index.drop(NAME)
    index.believe(NAME, 100, "boot")
    index.use(NAME, chain(10), 1, 2.0)
    index.doubt(NAME)
    index.trust_events(NAME)
    ran(index, chain(10), 0, 2.0)
    assert swept(index) == 0 and not index.is_believed(NAME)
    index.add(NAME)
    assert index.matched(chain(10)) == {} and not index.is_believed(NAME)


def test_snapshots_and_events_of_an_earlier_engine_are_ignored() -> None:
    """The snapshot that an earlier engine of that name left in Redis never becomes part of a belief."""
    index = believing(boot_id="boot")
    snapshot = Snapshot(NAME, "boot", 7, (3, 0), blocks.pack(chain(10)))
    assert index.begin_load(snapshot.head) is None
    stored = Batch(NAME, "boot", 0, 1, Op.STORED, tuple(chain(10)))
    assert apply(index, stored, (9, 0)) is BatchOutcome.STALE
    assert index.matched(chain(10)) == {}
    index.trust_events(NAME)
    load = index.begin_load(snapshot.head)
    assert load is not None and index.take(load, chain(5))
    index.believe(NAME, 100, "boot")
    assert not index.take(load, chain(5))
    index.end_load(load)
    assert index.matched(chain(10)) == {} and swept(index) == 0


def test_an_engine_that_gets_events_is_followed_by_them() -> None:
    """After an upgrade of the engine its events count, and nothing of the belief is left."""
    index = believing()
    ran(index, chain(10), 0, 1.0)
    index.trust_events(NAME)
    assert index.matched(chain(10)) == {} and swept(index) == 0
    for _ in index.load(Snapshot(NAME, "boot-2", 7, (3, 0), blocks.pack(chain(4)))):
        pass
    assert index.matched(chain(10)) == {NAME: 4}
    index.use(NAME, chain(10), 3, 2.0)
    assert index.matched(chain(10)) == {NAME: 4}


def test_the_bound_of_the_index_bounds_beliefs() -> None:
    """Engines with more blocks than the index may have are believed up to its bound."""
    index = LocalPrefixIndex(64)
    index.add(NAME)
    index.believe(NAME, 4_000_000_000, "boot")
    for start in range(1, 30):
        ran(index, chain(10, start=start), 0, float(start))
        swept(index)
    believed = index._replicas[NAME].believed
    assert believed is not None and len(believed) <= 64
