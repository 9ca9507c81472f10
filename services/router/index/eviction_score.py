"""Eviction scores of blocks: a byte per block, found by its hash, higher for recent use (an approximate LRU).

Pure. Blocks that share a byte have the highest of their scores. Eviction then spares one block too many.

    0              unknown
    1 to 127       loaded with a snapshot and not used since; its first blocks, ancestors of others, have higher scores
    128 to 255     used: 255 since the last eviction, one less for each eviction after it
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Final

USED: Final = 255
LOADED_MAX: Final = 127

SLOTS_MIN: Final = 1 << 12
SLOTS_PER_BLOCK: Final = 2
AGE_SLOTS: Final = 1 << 19
"""Slots that age in one slice: about 0.4 ms (measured once, by hand)."""

_AGED: Final = bytes(value - (value > LOADED_MAX + 1) for value in range(256))


def loaded(position: int, total: int) -> int:
    """Return the score of the block at `position` of a snapshot of `total` blocks."""
    return LOADED_MAX - position // loaded_step(total)


def loaded_step(total: int) -> int:
    """Return how many consecutive blocks in a snapshot of `total` blocks have the same score."""
    return total // LOADED_MAX + 1


class EvictionScores:
    """`slots[key & last]` is the score of the block with `key`."""

    def __init__(self, blocks: int = 0) -> None:
        """Allocate slots for `blocks`, 2 to 4 for each."""
        size = SLOTS_MIN
        while size < SLOTS_PER_BLOCK * blocks:
            size *= 2
        # Memory of the kernel, mapped page by page at the first access: a bytearray writes all of its zeros at once.
        self.slots = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.last = size - 1

    def needs_more_slots(self, blocks: int) -> bool:
        """Return True if `blocks` should have more slots than now. With too few, more blocks share a slot."""
        return SLOTS_PER_BLOCK * blocks > len(self.slots)

    def age(self) -> Iterator[None]:
        """Lower the scores of used blocks by one, slice by slice."""
        at = 0
        while at < len(self.slots):
            self.slots[at : at + AGE_SLOTS] = self.slots[at : at + AGE_SLOTS].translate(_AGED)
            at += AGE_SLOTS
            yield
