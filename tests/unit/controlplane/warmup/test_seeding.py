"""The plan of a seeding: its properties for random records, and its rules one by one."""

from __future__ import annotations

import random

from controlplane.warmup.hot_record import HotPrefix
from controlplane.warmup.jobs import Target
from controlplane.warmup.seeding import SeedStep, in_pieces, plan
from kvmesh import blocks
from kvmesh.attach.frames import pack_ids

BLOCK, VERSION = 2, "v1"
TARGET = Target("fresh", "b", "e", "prefill", "default", VERSION, BLOCK, "127.0.0.1:1")
SOURCES = ("a", "b", "c")


def chain(token_ids: bytes) -> list[int]:
    """Return the hashes of a prefix."""
    return blocks.chain(token_ids, BLOCK, VERSION)


def prefix(*heads: int, **holders: int) -> HotPrefix:
    """Return a prefix with one block for each of `heads`."""
    return HotPrefix(pack_ids([token for head in heads for token in (head, head)]), 1.0, 1, holders)


def sizes(steps: tuple[SeedStep, ...]) -> list[tuple[int, int, str]]:
    """Return the blocks to pull, the blocks that the target lacks, and the source of each step."""
    return [(len(chain(step.token_ids)), step.blocks, step.source) for step in steps]


def test_random_records_give_steps_within_their_bounds() -> None:
    """Steps keep the order, pull what the source holds, and count each block once, up to the bound."""
    for seed in range(400):
        chance = random.Random(seed)
        record = [
            prefix(
                *(chance.randrange(3) for _ in range(chance.randint(1, 8))),
                **{
                    name: chance.randint(0, 9)
                    for name in (*SOURCES, "fresh", "stranger")
                    if chance.random() < 0.4
                },
            )
            for _ in range(chance.randint(0, 30))
        ]
        package = [each.token_ids for each in chance.sample(record, min(2, len(record)))]
        most, is_replay, is_empty = chance.randint(1, 60), chance.random() < 0.3, chance.random() < 0.3
        steps = plan(record, package, TARGET, SOURCES, most, is_replay=is_replay, is_empty=is_empty)
        has = {each for one in record for each in chain(one.token_ids)[: one.holders.get("fresh", 0)]}
        if is_empty:
            has = set()  # routers list the blocks of the engine process before it
        held: dict[str, set[int]] = {name: set() for name in SOURCES}
        for one in record:
            for name in SOURCES:
                held[name].update(chain(one.token_ids)[: one.holders.get(name, 0)])
        copied: set[int] = set()
        for step in steps:
            found = chain(step.token_ids)
            assert len(step.token_ids) == 4 * BLOCK * len(found), f"seed={seed}"
            fresh = set(found) - has - copied
            assert step.blocks == len(fresh) >= 1, f"seed={seed}"
            assert found[-1] in fresh, f"seed={seed}: nothing is pulled in vain"
            assert set(found) <= held[step.source] if step.source else True, f"seed={seed}"
            assert step.source or is_replay or step.token_ids in _heads(package), f"seed={seed}"
            copied |= fresh
        assert len(copied) <= most, f"seed={seed}"
        if len(copied) < most and not is_replay:
            wanted = {block for blocks_held in held.values() for block in blocks_held} - has
            wanted |= {block for each in package for block in chain(each)} - has
            assert wanted == copied, f"seed={seed}: nothing that can be copied is left"


def _heads(package: list[bytes]) -> set[bytes]:
    """Return all leading parts of `package` in full blocks."""
    size = 4 * BLOCK
    return {each[:end] for each in package for end in range(size, len(each) + 1, size)}


def test_the_deepest_source_is_taken_and_equal_ones_share() -> None:
    """A prefix is cut to the part that is held; a source that holds less is not asked."""
    record = [prefix(1, 1, 1, a=1, b=2), prefix(2, 2, a=2, b=2), prefix(3, 3, a=2, b=2), prefix(4, 4)]
    assert sizes(plan(record, [], TARGET, SOURCES, 99)) == [(2, 2, "b"), (2, 2, "a"), (2, 2, "a")]
    record = [prefix(head, head, a=2, b=2, c=2) for head in range(9)]
    sources = [step.source for step in plan(record, [], TARGET, SOURCES, 99)]
    assert {name: sources.count(name) for name in SOURCES} == {"a": 3, "b": 3, "c": 3}


def test_blocks_that_the_target_has_cost_nothing() -> None:
    """Neither those that it held before nor those of an earlier prefix count again."""
    record = [prefix(1, 2, a=2, fresh=2), prefix(1, 2, 3, a=3), prefix(1, 2, 4, 5, a=4), prefix(1, 2, a=2)]
    assert sizes(plan(record, [], TARGET, SOURCES, 99)) == [(3, 1, "a"), (4, 2, "a")]
    assert sizes(plan(record, [], TARGET, SOURCES, 2)) == [(3, 1, "a"), (3, 1, "a")]


def test_a_package_is_computed_first_unless_a_source_holds_it() -> None:
    """The target computes a package's prefix that no source holds as a whole."""
    record = [prefix(1, 1, 1, a=3), prefix(2, 2, b=1)]
    package = [prefix(2, 2).token_ids, prefix(1, 1).token_ids]
    assert sizes(plan(record, package, TARGET, SOURCES, 99)) == [(2, 2, ""), (2, 2, "a"), (3, 1, "a")]


def test_a_replay_computes_everything() -> None:
    """No source is asked, and holders do not matter."""
    record = [prefix(1, 1, a=1), prefix(2)]
    assert sizes(plan(record, [prefix(3).token_ids], TARGET, SOURCES, 99, is_replay=True)) == [
        (1, 1, ""),
        (2, 2, ""),
        (1, 1, ""),
    ]


def test_nothing_hot_is_no_step() -> None:
    """An empty record, an empty prefix, and a part of a block."""
    partial = HotPrefix(pack_ids([1]), 1.0, 1, {"a": 1})
    assert plan([], [b""], TARGET, SOURCES, 9) == plan([partial], [], TARGET, SOURCES, 9) == ()


def test_pieces_copy_the_same_blocks_in_order() -> None:
    """Each piece is at most as long as allowed behind the part that is there; the last one is the whole prefix."""
    for seed in range(200):
        chance = random.Random(seed)
        whole = prefix(*(chance.randrange(9) for _ in range(chance.randint(1, 20)))).token_ids
        lacking = chance.randint(1, len(chain(whole)))
        tokens_max = chance.randint(1, 12)
        at = len(chain(whole)) - lacking
        pieces = list(in_pieces([SeedStep(whole, lacking)], BLOCK, tokens_max))
        for each in pieces:
            end = len(each.token_ids) // (4 * BLOCK)
            assert each.token_ids == whole[: len(each.token_ids)], f"seed={seed}"
            assert end - at == each.blocks <= max(1, tokens_max // BLOCK), f"seed={seed}"
            at = end
        assert [each.is_last for each in pieces] == [*(False for _ in pieces[1:]), True], f"seed={seed}"
        assert at == len(chain(whole)), f"seed={seed}"
