"""In-flight (speculative) blocks: the blocks that dispatched requests will leave in a replica's cache soon.

Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

SLICE_BLOCKS: Final = 1024
"""Blocks removed in one slice: about half a millisecond (measured once, by hand)."""


class InFlightBlocks:
    """`masks[hash]` holds the replicas that will have the block. Blocks are counted, because requests share them."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        self.changes = 0
        """Counts every change of a mask."""
        self._counts: dict[str, dict[int, int]] = {}
        """By replica: block -> dispatched and unfinished requests that will leave it there."""
        self._removals: deque[tuple[str, Sequence[int]]] = deque()
        """Blocks that `apply_removals` has still to remove, by replica."""

    def add(self, name: str, bit: int, hashes: Sequence[int]) -> None:
        """Add the blocks `hashes` of one more request at `name`, which has the bit `bit`."""
        counts, masks = self._counts.setdefault(name, {}), self.masks
        self.changes += 1
        for value in hashes:
            count = counts.get(value, 0)
            counts[value] = count + 1
            if not count:
                masks[value] = masks.get(value, 0) | bit

    def remove(self, name: str, bit: int, hashes: Sequence[int]) -> None:
        """Undo one `add`. Blocks that were not added are skipped."""
        counts = self._counts.get(name, {})
        self.changes += 1
        for value in hashes:
            count = counts.get(value, 0)
            if count > 1:
                counts[value] = count - 1
            elif count:
                del counts[value]
                self._clear(value, bit)

    def remove_later(self, name: str, hashes: Sequence[int]) -> None:
        """Undo one `add` with the next `apply_removals`, for many requests at once. O(1)."""
        self._removals.append((name, hashes))

    @property
    def has_removals(self) -> bool:
        """Return True if `apply_removals` has something to do."""
        return bool(self._removals)

    def apply_removals(self, bit_of: Callable[[str], int]) -> Iterator[None]:
        """Apply the removals in slices, from the end of each prompt, so that every remaining block has its ancestors.

        `bit_of` returns the present bit of a replica.
        """
        while self._removals:
            name, hashes = self._removals.popleft()
            if len(hashes) > SLICE_BLOCKS:
                self._removals.appendleft((name, hashes[:-SLICE_BLOCKS]))
            self.remove(name, bit_of(name), hashes[-SLICE_BLOCKS:])
            yield

    def move(self, name: str, old: int, new: int) -> None:
        """Move the blocks of `name` to another bit."""
        self.changes += 1
        for value in self._counts.get(name, ()):
            self.masks[value] = self.masks[value] & ~old | new

    def drop(self, name: str, bit: int) -> None:
        """Remove all blocks of `name`."""
        self.changes += 1
        self._removals = deque(one for one in self._removals if one[0] != name)
        for value in self._counts.pop(name, ()):
            self._clear(value, bit)

    def _clear(self, value: int, bit: int) -> None:
        rest = self.masks[value] & ~bit
        if rest:
            self.masks[value] = rest
        else:
            del self.masks[value]

    def assert_consistent(self, bits: dict[str, int]) -> None:
        """Raise AssertionError if counts and masks disagree. `bits`: the bit of each replica."""
        masks: dict[int, int] = {}
        for name, counts in self._counts.items():
            for value, count in counts.items():
                assert count > 0, f"{name} counts a block {count} times"
                masks[value] = masks.get(value, 0) | bits[name]
        assert masks == self.masks, "counts and masks disagree"
