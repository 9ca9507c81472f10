"""In-flight blocks under random schedules, against a plain list of additions."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from services.router.index.in_flight import SLICE_BLOCKS, InFlightBlocks
from services.router.index.local_index import LocalPrefixIndex


@pytest.mark.parametrize("seed", range(20))
def test_deferred_removals_remove_once(seed: int) -> None:
    """Deferred removals have the result of immediate ones, whatever happens between two slices.

    This holds for changes of the same blocks and replica, too. Until the end the masks may have more bits, never fewer.
    """
    rng = random.Random(seed)
    in_flight, bits, free = InFlightBlocks(), {"a": 1, "b": 2}, [4, 8, 16]
    expected: list[tuple[str, tuple[int, ...]]] = []
    slices: Iterator[None] = iter(())

    def masks() -> dict[int, int]:
        found: dict[int, int] = {}
        for name, hashes in expected:
            for value in hashes:
                found[value] = found.get(value, 0) | bits[name]
        return found

    for _ in range(150):
        kind, name = rng.random(), rng.choice("ab")
        if kind < 0.4:
            start = rng.randrange(4 * SLICE_BLOCKS)
            hashes = tuple(range(start, start + rng.randrange(3 * SLICE_BLOCKS)))
            in_flight.add(name, bits[name], hashes)
            expected.append((name, hashes))
        elif kind < 0.7 and expected:
            left, hashes = expected.pop(rng.randrange(len(expected)))
            if rng.random() < 0.3:
                in_flight.remove(left, bits[left], hashes)
            else:
                in_flight.remove_later(left, hashes)
        elif kind < 0.8:
            old, bits[name] = bits[name], free.pop()
            if rng.random() < 0.5:
                in_flight.move(name, old, bits[name])
            else:
                in_flight.drop(name, old)
                expected = [one for one in expected if one[0] != name]
            free.append(old)
        else:
            for _ in range(rng.randrange(4)):
                if next(slices, 0) is not None:
                    slices = in_flight.apply_removals(bits.__getitem__)
        in_flight.assert_consistent(bits)
        here = in_flight.masks
        assert all(here.get(value, 0) & mask == mask for value, mask in masks().items())
    list(in_flight.apply_removals(bits.__getitem__))
    assert in_flight.masks == masks() and not in_flight.has_removals


def test_no_slice_removes_more_than_its_share() -> None:
    """A slice removes a thousand blocks, of however many requests, and no block before its descendants."""
    local_index = LocalPrefixIndex()
    local_index.add("p0")
    prompts = [tuple(range(index << 20, (index << 20) + 3000)) for index in range(20)]
    for prompt in prompts:
        local_index.add_in_flight("p0", prompt)
    for prompt in prompts:
        local_index.remove_in_flight_later("p0", prompt)
    left = local_index.in_flight_block_count
    assert left == 60_000, "it takes no time to say so"
    assert local_index.needs_maintenance
    for _ in local_index.maintain():
        assert left - local_index.in_flight_block_count <= SLICE_BLOCKS
        left = local_index.in_flight_block_count
        for prompt in prompts:
            is_there = [value in local_index._in_flight.masks for value in prompt]
            assert is_there == sorted(is_there, reverse=True)
    assert left == 0 and not local_index.needs_maintenance
