"""A replica's cache of blocks with LRU eviction, leaves before their parents. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockCache:
    """Holds at most `capacity` blocks.

    INVARIANT: with a block all its ancestors are held. A use touches the leaf first and the root last, so that every
    ancestor is more recent than its descendants.
    """

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, value: int) -> bool:
        return value in self._blocks

    def depth(self, hashes: Sequence[int]) -> int:
        """Return how many leading blocks of `hashes` are held."""
        blocks = self._blocks
        low, high = 0, len(hashes)  # the answer is in low..high
        while low < high:
            middle = (low + high) >> 1
            if hashes[middle] in blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def use(self, hashes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Make `hashes` the most recent blocks. Return the added blocks, root first, and the evicted ones, leaf first."""
        blocks = self._blocks
        touch = blocks.move_to_end
        added = []
        for value in reversed(hashes):
            if value in blocks:
                touch(value)
            else:
                blocks[value] = None
                added.append(value)
        removed = []
        while len(blocks) > self.capacity:
            removed.append(blocks.popitem(last=False)[0])
        added.reverse()
        return added, removed
