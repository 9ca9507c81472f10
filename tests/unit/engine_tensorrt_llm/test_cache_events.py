"""KV cache events: a follower of random caches, beside a model of what is cached."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engines.contract.kv_events import BlocksStored, KvCacheEvent
from engines.tensorrt_llm.cache_events import REMOVED_MAX, CacheEvents

WIDTH = 4


def test_an_event_of_another_form_drops_what_is_known() -> None:
    """Nothing of it can be trusted, and the events behind it are read."""
    events = CacheEvents(WIDTH, 8)
    cache = Cache(random.Random(1), 8)
    found = events.apply([cache.event({"type": "stored", "parent_hash": None, "blocks": [cache._block(1)]})])
    assert isinstance(found[0], BlocksStored)
    broken = cache.event({"type": "stored", "parent_hash": 1, "blocks": [{"block_hash": 2, "tokens": [{}]}]})
    for wrong in (broken, cache.event({"type": "removed"}), {"event_id": None}):
        events.apply([wrong])
        assert events.cached == 0
    assert events.unreadable == 3
    cache.number = 10
    events.apply([cache.event({"type": "stored", "parent_hash": None, "blocks": [cache._block(3)]})])
    assert events.cached == 1
    events.assert_consistent()


class Cache:
    """A cache that tells what TensorRT-LLM tells: chains, partial blocks, levels, evictions of leaves."""

    def __init__(self, rng: random.Random, blocks: int) -> None:
        self.rng = rng
        self.blocks = blocks
        self.parents: dict[int, int | None] = {}
        self.tokens: dict[int, list[int]] = {}
        self.hidden: set[int] = set()
        """Partial blocks, blocks with images, and all below them."""
        self.number = 0
        self.last = 0

    def event(self, data: dict[str, Any], window: int = 100) -> dict[str, Any]:
        self.number += 1
        return {"event_id": self.number - 1, "data": data, "window_size": window}

    def created(self) -> dict[str, Any]:
        return self.event({"type": "created", "num_blocks_per_cache_level": [self.blocks, 0]})

    def step(self) -> dict[str, Any]:
        kind = self.rng.random()
        if self.parents and (kind < 0.35 or len(self.parents) > self.blocks - 4):
            return self._remove()
        if self.parents and kind < 0.4:
            levels = {"type": "event_diff", "new_value": 1, "old_value": 0}
            return self.event(
                {"type": "updated", "block_hash": self.rng.choice(list(self.parents)), "cache_level": levels}
            )
        if kind < 0.45:
            return self.event(
                {"type": "stored", "parent_hash": None, "blocks": [self._block(10**9, 3)]}, window=8
            )
        return self._store()

    def _block(self, value: int, size: int = WIDTH, extra: int = 0) -> dict[str, Any]:
        ids = [self.rng.randrange(100) for _ in range(size)]
        tokens = [{"type": "unique_token", "token_id": each, "token_extra_id": extra} for each in ids]
        return {
            "type": "stored_block",
            "block_hash": value,
            "cache_level": 0,
            "priority": 35,
            "tokens": tokens,
        }

    def _store(self) -> dict[str, Any]:
        parent = self.rng.choice([None, *self.parents])
        first, blocks = parent, []
        for _ in range(self.rng.randrange(1, 4)):
            self.last += 1
            is_odd = self.rng.random() < 0.1
            block = self._block(
                self.last, *((WIDTH - 1, 0) if is_odd and self.last % 2 else (WIDTH, int(is_odd)))
            )
            if is_odd or parent in self.hidden:
                self.hidden.add(self.last)
            self.parents[self.last] = parent
            self.tokens[self.last] = [each["token_id"] for each in block["tokens"]]
            blocks.append(block)
            parent = self.last
        root = 0 if first is None and self.rng.random() < 0.5 else first
        return self.event({"type": "stored", "parent_hash": root, "blocks": blocks})

    def _remove(self) -> dict[str, Any]:
        leaves = list(self.parents.keys() - set(self.parents.values()))
        gone = self.rng.sample(leaves, min(len(leaves), 2))
        for value in gone:
            del self.parents[value]
            self.hidden.discard(value)
        return self.event({"type": "removed", "block_hashes": gone})


class Index:
    """A subscriber: applies the contract's events, and refuses those that it could not apply."""

    def __init__(self) -> None:
        self.parents: dict[int, int | None] = {}
        self.tokens: dict[int, bytes] = {}

    def apply(self, events: list[KvCacheEvent]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                parent = event.parent
                for value, tokens in event.blocks:
                    assert parent is None or parent in self.parents, "a block before its parent"
                    assert value not in self.parents, "a block was stored twice"
                    self.parents[value], self.tokens[value], parent = parent, tokens, value
            else:
                for value in event.hashes:
                    del self.parents[value]
                    assert value not in self.parents.values(), "a parent was removed before its child"


def _visible(cache: Cache) -> dict[int, int | None]:
    return {value: parent for value, parent in cache.parents.items() if value not in cache.hidden}


@pytest.mark.parametrize("seed", range(30))
def test_a_subscriber_knows_exactly_what_is_cached(seed: int) -> None:
    """After each batch: the events and a snapshot give the blocks of the cache, without those that ids cannot name."""
    rng = random.Random(seed)
    cache, index = Cache(rng, 60), Index()
    events = CacheEvents(WIDTH, 60)
    index.apply(events.apply([cache.created()]))
    for _ in range(60):
        index.apply(events.apply([cache.step() for _ in range(rng.randrange(1, 6))]))
        events.assert_consistent()
        assert index.parents == _visible(cache)
        fresh = Index()
        fresh.apply(list(events.snapshot()))
        assert fresh.parents == index.parents
        assert all(fresh.tokens[value] == index.tokens[value] for value in fresh.parents)
    assert events.gaps == 0 and events.cached == len(index.parents)


@pytest.mark.parametrize("seed", range(30))
def test_lost_events_drop_what_was_known(seed: int) -> None:
    """Whatever is lost: no subscriber believes in a block that is not cached, and later blocks are known again."""
    rng = random.Random(seed)
    cache, index = Cache(rng, 60), Index()
    events = CacheEvents(WIDTH, 60)
    lost = 0
    for _ in range(120):
        event = cache.step()
        if rng.random() < 0.1:
            lost += 1
            continue
        index.apply(events.apply([event]))
        events.assert_consistent()
        assert index.parents.items() <= _visible(cache).items()
    assert 0 < events.gaps <= lost and events.cached == len(index.parents)


def test_a_gap_is_told_as_removals_of_bounded_size() -> None:
    """Subscribers need no new snapshot: they are told that nothing is known."""
    cache, index = Cache(random.Random(1), 4000), Index()
    events = CacheEvents(1, 4000)
    chain = [{**cache._block(value, 1)} for value in range(1, 2001)]
    index.apply(events.apply([cache.event({"type": "stored", "parent_hash": None, "blocks": chain})]))
    assert events.cached == 2000
    cache.number += 1
    dropped = events.apply([cache.event({"type": "removed", "block_hashes": [1]})])
    index.apply(dropped)
    assert not index.parents and events.gaps == 1 and len(dropped) == -(-2000 // REMOVED_MAX)


def test_more_blocks_than_exist_are_a_gap() -> None:
    """The blocks that are kept are bounded by the cache, host memory included."""
    cache, index = Cache(random.Random(1), 3), Index()
    events = CacheEvents(1, 3)
    for value in range(1, 9):
        data = {"type": "stored", "parent_hash": None, "blocks": [cache._block(value, 1)]}
        index.apply(events.apply([cache.event(data)]))
        events.assert_consistent()
    assert events.gaps == 2
    events.apply([cache.event({"type": "created", "num_blocks_per_cache_level": [3, 5]})])
    assert events.blocks_max == 8


def test_a_removed_parent_takes_its_children_along() -> None:
    """Nothing reaches a block whose parent is gone."""
    cache, events = Cache(random.Random(1), 9), CacheEvents(1, 9)
    chain = [cache._block(value, 1) for value in (1, 2, 3)]
    events.apply([cache.event({"type": "stored", "parent_hash": None, "blocks": chain})])
    (gone,) = events.apply([cache.event({"type": "removed", "block_hashes": [2]})])
    assert not isinstance(gone, BlocksStored) and gone.hashes == (3, 2) and events.cached == 1
    assert (
        events.apply([cache.event({"type": "stored", "parent_hash": 3, "blocks": [cache._block(9, 1)]})])
        == []
    )
