"""Prompts of random token ids. Pure: chance comes from a seed.

The ids avoid both ends of the vocabulary, where special tokens are, and the end tokens that the operator names.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Final

VOCABULARY_ASSUMED: Final = 1024
"""Ids below this are drawn if the size of the vocabulary is unknown."""

_LOW: Final = 256
_LOW_SHARE: Final = 16
_HIGH_SHARE: Final = 32


class Prompts:
    """Draws prompts that do not repeat."""

    def __init__(self, seed: int, vocab_size: int, avoided: Collection[int] = ()) -> None:
        """`vocab_size`: 0 if unknown. `avoided`: ids that no prompt has."""
        size = vocab_size or VOCABULARY_ASSUMED
        self._chance = random.Random(seed)
        low, high = min(_LOW, size // _LOW_SHARE), size - size // _HIGH_SHARE
        self._ids = [each for each in range(low, high) if each not in avoided]

    def draw(self, length: int) -> tuple[int, ...]:
        """Return a prompt of `length` ids."""
        return tuple(self._chance.choices(self._ids, k=length))

    def other_than(self, taken: Sequence[int]) -> int:
        """Return an id that is not in `taken`."""
        while (found := self._chance.choice(self._ids)) in taken:
            pass
        return found

    def chance(self) -> random.Random:
        """Return the source of chance of all prompts."""
        return self._chance
