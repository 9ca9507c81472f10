"""The shortlist of many replicas: each replica gets its turn, and the best one is on it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.decode_choice import NO_LOAD
from services.router.placement.policy import ReplicaState, Started
from services.router.placement.shortlist import COMPARE_ALL_MAX, HOLDERS, LEAST_LOADED, Match, Shortlist
from tests.unit.router.placement.test_cost_policy import (
    BLOCK,
    dispatched,
    placed,
    policy_of,
    request,
    view_of,
)


@pytest.mark.parametrize("decodes", [COMPARE_ALL_MAX, COMPARE_ALL_MAX + 1, 24, 32, 48, 49, 80])
def test_equal_decode_replicas_share_however_many_there_are(decodes: int) -> None:
    """The replica with most room on the shortlist is chosen, and all replicas are short-listed in turn."""
    policy, view = policy_of(1, decodes, seed=decodes), view_of(1, decodes)
    by_name = {one.name: one for one in view.decode}
    counts: Counter[str] = Counter()
    for name in range(20 * decodes):
        decode = placed(policy.place(request(name, 100, name * 1000), view, 0.0)).decode
        by_name[decode].block_reserved += 10
        counts[decode] += 1
    assert len(counts) == decodes and max(counts.values()) <= 22 and min(counts.values()) >= 18, counts


@pytest.mark.parametrize("seed", range(6))
def test_an_idle_holder_of_a_block_less_is_compared(seed: int) -> None:
    """The deepest holders are all busy. A holder of one block less recomputes little, compared with waiting for them."""
    rng = random.Random(seed)
    count, deepest = rng.choice((40, 64, 300)), rng.choice((8, 30))
    policy = policy_of(count, 1, seed=seed)
    shared = tuple(range(90))
    for index in range(count):
        policy.local_index.store(
            f"p{index}", shared[: 90 if index < deepest else 89 if index < deepest + 5 else 0]
        )
    for index in range(count):
        if not deepest <= index < deepest + 5:
            policy.observe(dispatched(index, f"p{index}", 4.0))
            policy.observe(Started("router-0", f"{index:032x}", 0.0))
    view = view_of(count, 1)
    for name in range(30):
        answer = placed(policy.place(request(1000 + name, len(shared) * BLOCK), view, 0.0))
        assert answer.prefill is not None and deepest <= int(answer.prefill[1:]) < deepest + 5, answer


@pytest.mark.parametrize("seed", range(10))
def test_holders_are_few_and_the_deepest_is_among_them(seed: int) -> None:
    """No more replicas are compared than the bound, none twice, each with its held blocks."""
    rng, local_index = random.Random(seed), LocalPrefixIndex()
    replicas = [ReplicaState(f"p{index}") for index in range(rng.randint(COMPARE_ALL_MAX + 1, 120))]
    hashes = tuple(range(60))
    held = {one.name: rng.choice((0, 0, 0, 1, 59, rng.randint(0, 60))) for one in replicas}
    for name, depth in held.items():
        local_index.add(name)
        local_index.store(name, hashes[:depth])
    shortlist = Shortlist(rng)
    for load in (NO_LOAD, {one.name: rng.random() for one in replicas}):
        found = shortlist.of(replicas, Match(local_index, hashes), load)
        names = [one.name for one, _ in found]
        assert len(set(names)) == len(names) <= HOLDERS + LEAST_LOADED
        assert all(held[one.name] == depth for one, depth in found)
        assert max(depth for _, depth in found) == max(held.values())
        holders = sum(depth > 0 for depth in held.values())
        assert sum(depth > 0 for _, depth in found) >= min(HOLDERS, holders)
