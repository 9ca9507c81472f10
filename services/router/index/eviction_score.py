"""What blocks are worth keeping: a byte for each, found by its hash, higher for what was used more recently.

Pure. Blocks that share a byte are worth what the best of them is: eviction then spares one block too many.

    0              unknown
    1 to 127       loaded with a snapshot and not used since; its first blocks, ancestors of others, are worth more
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
"""Slots that age in one slice: about 0.4 ms."""

_AGED: Final = bytes(value - (value > LOADED_MAX + 1) for value in range(256))


def loaded(position: int, total: int) -> int:
    """Return what the block at `position` of a snapshot of `total` blocks is worth."""
    return LOADED_MAX - position // loaded_step(total)


def loaded_step(total: int) -> int:
    """Return how many neighbours in a snapshot of `total` blocks are worth the same."""
    return total // LOADED_MAX + 1


class EvictionScores:
    """`slots[key & last]` is what the block with `key` is worth."""

    def __init__(self, blocks: int = 0) -> None:
        """Have slots for `blocks`, 2 to 4 for each."""
        size = SLOTS_MIN
        while size < SLOTS_PER_BLOCK * blocks:
            size *= 2
        # Of the kernel, page by page when they are touched: a bytearray writes all of its zeros at once.
        self.slots = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.last = size - 1

    def needs_more_slots(self, blocks: int) -> bool:
        """True if `blocks` should have more slots: until they do, more of them share one."""
        return SLOTS_PER_BLOCK * blocks > len(self.slots)

    def age(self) -> Iterator[None]:
        """What was used is worth one less, slice by slice."""
        at = 0
        while at < len(self.slots):
            self.slots[at : at + AGE_SLOTS] = self.slots[at : at + AGE_SLOTS].translate(_AGED)
            at += AGE_SLOTS
            yield
