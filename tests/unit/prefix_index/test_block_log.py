"""The log of a cache against a plain twin: an ordered dict, and a copy of it for each reader."""

from __future__ import annotations

import random
from contextlib import ExitStack

import pytest

from kvmesh import blocks
from kvmesh.prefix_index import block_log
from kvmesh.prefix_index.block_log import PART_BLOCKS, STEP_BLOCKS, BlockLog


@pytest.mark.parametrize("seed", range(40))
def test_a_reader_sees_one_moment_whatever_happens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are added, removed, added again and cleared between the parts of a snapshot; gaps are compacted in between."""
    part_blocks = random.Random(seed).choice((1, 3, 16))
    monkeypatch.setattr(block_log, "PART_BLOCKS", part_blocks)
    monkeypatch.setattr(block_log, "SHARDS", 7)
    rng = random.Random(seed)
    log, twin, seen = BlockLog(), dict[int, int](), 0
    keys = [rng.getrandbits(64) - (1 << 63) for _ in range(60)]
    stores = rng.choice((0.3, 0.5, 0.7))

    def change() -> bool:
        """Do one random thing. Return True after a clear."""
        key, kind = rng.choice(keys), rng.random()
        if kind < 0.004:
            twin.clear()
            log.clear()
            return True
        if kind < stores:
            value = rng.choice((abs(key) + 1, abs(key) + 1, rng.getrandbits(64) or 1))
            if twin.get(key) != value:
                twin.pop(key, None)
            twin[key] = value
            log.put(key, value)
        else:
            assert log.pop(key) == twin.pop(key, None)
        assert len(log) == len(twin) and log.get(key) == twin.get(key)
        return False

    for _ in range(60):
        for _ in range(rng.randrange(60)):
            change()
        wanted, found, is_forgotten, steps = tuple(twin.values()), list[int](), False, rng.randrange(30)
        with ExitStack() as stack:
            parts = stack.enter_context(log.snapshot())
            for part in parts:
                assert len(part) <= 8 * part_blocks
                found += blocks.unpack(part)
                for _ in range(steps):
                    is_forgotten |= change()
                if rng.random() < 0.02:
                    break
            else:
                seen += not is_forgotten
                assert is_forgotten or tuple(found) == wanted, f"{seed=}"
        assert tuple(found) == wanted[: len(found)], f"{seed=}"
        with log.snapshot() as parts:
            assert [one for part in parts for one in blocks.unpack(part)] == list(twin.values()), f"{seed=}"
    assert seen
    assert all(log.get(key) == twin.get(key) for key in keys)


def test_gaps_are_compacted_a_few_at_a_time_and_the_log_stays_short() -> None:
    """An endless turnover takes no more positions than twice the blocks and some. No removal does much work."""
    log, held = BlockLog(), 20_000
    for key in range(held):
        log.put(key << 10, key + 1)
    most = 0
    for key in range(held, 12 * held):
        log.put(key << 10, key + 1)
        log.pop((key - held) << 10)
        most = max(most, log.size)
    assert len(log) == held
    assert most <= 2.5 * held + PART_BLOCKS
    for key in range(11 * held, 12 * held - 10):
        log.pop(key << 10)
    assert len(log) == 10 and log.size <= PART_BLOCKS + 20


def test_removals_behind_a_reader_are_applied_part_by_part() -> None:
    """A cache that is emptied between two parts of a snapshot leaves no large piece of work for its end."""
    log = BlockLog()
    for key in range(3 * PART_BLOCKS):
        log.put(key, key + 1)
    with log.snapshot() as parts:
        next(parts)
        for key in range(3 * PART_BLOCKS):
            log.pop(key)
        left = []
        for part in parts:
            assert len(part) == 8 * PART_BLOCKS
            left.append(sum(map(bool, log._hashes)))
        assert left == [PART_BLOCKS, 0]


def test_one_removal_moves_few_blocks() -> None:
    """A removal moves few blocks, however many gaps there are."""
    moves = 0

    class Counted(dict[int, int]):
        def __setitem__(self, key: int, value: int) -> None:
            nonlocal moves
            moves += 1
            super().__setitem__(key, value)

    log = BlockLog()
    for key in range(50_000):
        log.put(key, key + 1)
    log._positions = [Counted(places) for places in log._positions]
    most = 0
    for key in range(49_000):
        moves = 0
        log.pop(key)
        most = max(most, moves)
    assert 0 < most <= STEP_BLOCKS
