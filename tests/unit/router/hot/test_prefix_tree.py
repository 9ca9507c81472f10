"""Hot prefixes are leading parts of recorded prompts, in the greedy order, and never overstate their tenants."""

from __future__ import annotations

import random

import pytest

from kvmesh import blocks
from kvmesh.attach.frames import pack_ids
from services.router.hot.decay import decayed
from services.router.hot.prefix_tree import TENANTS_MAX, HotPrefix, PrefixTree
from services.router.hot.prompt_records import PromptRecord

BLOCK = 2
NOW_S = 500.0


def record(ids: list[int], tenant: str = "t", weight: float = 1.0, at_s: float = NOW_S) -> PromptRecord:
    token_ids = pack_ids(ids)
    hashes = blocks.pack(blocks.chain(token_ids, BLOCK, "m"))
    return PromptRecord(tenant, "r", token_ids, hashes, weight, at_s)


def random_records(rng: random.Random) -> list[PromptRecord]:
    """Return prompts that share beginnings: each one continues a leading part of an earlier one."""
    prompts: list[list[int]] = [[]]
    found = []
    for _ in range(rng.randrange(1, 40)):
        parent = rng.choice(prompts)
        kept = parent[: rng.randrange(len(parent) + 1)] if rng.random() < 0.5 else parent
        ids = [*kept, *(rng.randrange(3) for _ in range(rng.choice((0, 1, 2, 8, 30))))]
        prompts.append(ids)
        tenant, weight = f"tenant-{rng.randrange(5)}", rng.choice((1.0, 2.5, 0.1))
        found.append(record(ids, tenant, weight, NOW_S - rng.choice((0.0, 60.0, 400.0))))
    return found


def ranked(
    records: list[PromptRecord], most: int = 10**6, tenants: int = 0, depth_max: int = 10**6
) -> list[HotPrefix]:
    tree = PrefixTree(BLOCK, depth_max)
    for one in records:
        tree.insert(one, NOW_S)
    return [one for one in tree.ranked(most, tenants) if one is not None]


def tokens(prefix: HotPrefix) -> bytes:
    return prefix.record.token_ids[: 4 * BLOCK * prefix.block_count]


def senders(records: list[PromptRecord], prefix: bytes) -> list[PromptRecord]:
    """Return the records that begin with `prefix`."""
    return [one for one in records if one.token_ids.startswith(prefix)]


@pytest.mark.parametrize("seed", range(150))
def test_prefixes_weights_and_tenants_by_brute_force(seed: int) -> None:
    """Weights and tenants are those of all records that begin with the prefix, whatever their order."""
    rng = random.Random(seed)
    records = random_records(rng)
    found = ranked(records)
    for one in found:
        below = senders(records, tokens(one))
        assert below and len(tokens(one)) == 4 * BLOCK * one.block_count > 0
        assert one.weight == pytest.approx(sum(decayed(each.weight, NOW_S - each.at_s) for each in below))
        assert one.tenant_count == len({each.tenant for each in below})
    assert len({tokens(one) for one in found}) == len(found)
    whole = {one.token_ids[: len(one.token_ids) // (4 * BLOCK) * 4 * BLOCK] for one in records} - {b""}
    assert whole <= {tokens(one) for one in found}, "the whole blocks of each prompt are there"
    # Every other prefix is one at which prompts part.
    for prefix in {tokens(one) for one in found} - whole:
        following = {each[len(prefix) : len(prefix) + 4 * BLOCK] for each in whole if each.startswith(prefix)}
        assert len(following) >= 2


@pytest.mark.parametrize("seed", range(150))
def test_the_order_is_greedy_and_every_parent_comes_first(seed: int) -> None:
    """Weights descend, and the blocks of every beginning of the list are closed under parents: for every bound.

    The blocks before a bound are worth the most: as much as the heaviest blocks of all, each at its own weight.
    """
    rng = random.Random(seed)
    records = random_records(rng)
    weights: dict[bytes, float] = {}
    for each in records:
        for end in range(4 * BLOCK, len(each.token_ids) + 1, 4 * BLOCK):
            part = each.token_ids[:end]
            weights[part] = weights.get(part, 0.0) + decayed(each.weight, NOW_S - each.at_s)
    if not weights:
        assert ranked(records) == []
        return
    most = rng.randrange(1, len(weights) + 3)
    found = ranked(records, most)
    assert [one.weight for one in found] == sorted((one.weight for one in found), reverse=True)
    covered: set[bytes] = set()
    for one in found:
        parts = [tokens(one)[:end] for end in range(4 * BLOCK, len(tokens(one)) + 1, 4 * BLOCK)]
        new = [part for part in parts if part not in covered]
        assert new and parts[-len(new) :] == new, "known blocks are the leading ones"
        assert all(part in covered or weights[part] == pytest.approx(one.weight) for part in parts)
        covered.update(parts)
    assert len(covered) == min(most, len(weights))
    best = sum(sorted(weights.values(), reverse=True)[:most])
    assert sum(weights[part] for part in covered) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(150))
def test_a_prefix_was_sent_by_enough_tenants(seed: int) -> None:
    """Each returned prefix was sent by at least the wanted number of tenants, and every longest such one is returned."""
    rng = random.Random(seed)
    records = random_records(rng)
    for wanted in (2, 3, 5):
        found = {tokens(one) for one in ranked(records, tenants=wanted)}
        for prefix in found:
            assert len({each.tenant for each in senders(records, prefix)}) >= wanted
        for sent in records:
            longest = b""
            for end in range(4 * BLOCK, len(sent.token_ids) + 1, 4 * BLOCK):
                if len({each.tenant for each in senders(records, sent.token_ids[:end])}) >= wanted:
                    longest = sent.token_ids[:end]
            assert not longest or longest in found


def test_tenants_are_counted_up_to_a_bound() -> None:
    """More tenants than TENANTS_MAX count as TENANTS_MAX, and reach no higher minimum."""
    records = [record([1, 2, number, number], f"tenant-{number}") for number in range(300)]
    (first, *rest) = ranked(records)
    assert (first.block_count, first.tenant_count) == (1, TENANTS_MAX)
    assert {one.tenant_count for one in rest} == {1}
    assert len(ranked(records, tenants=TENANTS_MAX)) == 1 and not ranked(records, tenants=TENANTS_MAX + 1)


def test_blocks_beyond_the_depth_are_left_out() -> None:
    """A long prompt is there by its leading part, and two prompts that part behind it are one prefix."""
    records = [record([*range(100), last, last], weight=2.0) for last in (5, 6)]
    (only,) = ranked(records, depth_max=7)
    assert (only.block_count, only.weight) == (7, 4.0)


def test_prompts_that_contain_each_other_are_found_in_any_order() -> None:
    """The tree does not depend on the order of the records, up to rounding."""
    rng = random.Random(1)
    records = [record(list(range(length))) for length in range(60)]
    expected = [(one.block_count, one.weight) for one in ranked(records)]
    assert expected[0] == (1, 58.0) and expected[-1] == (29, 2.0)
    for _ in range(10):
        rng.shuffle(records)
        assert [(one.block_count, one.weight) for one in ranked(records)] == expected
