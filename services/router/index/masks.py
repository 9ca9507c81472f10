"""Sets of replicas as integers: a bit per replica, and one shared object per set.

Pure.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import compress, count
from typing import Final

MASKS_MIN: Final = 1 << 16
"""Up to this many shared masks, unused ones are not purged."""

PURGE_MASKS: Final = 4096
"""Masks looked at in one slice: about 0.5 ms (measured once, by hand)."""

FEW_BITS: Final = 16
"""Up to this many bits are taken one by one. For more, the digits of the number are read."""

NAMED_MAX: Final = 1024
"""Masks of few bits with cached names. Prompts with a common prefix have the same holders."""

_DIGITS: Final = bytes.maketrans(b"01", b"\x00\x01")


def bits(mask: int) -> list[int]:
    """Return the numbers of the bits set in `mask`, in any order."""
    if mask.bit_count() > FEW_BITS:
        return list(compress(count(), _digits(mask)))
    numbers = []
    while mask:
        number = mask.bit_length() - 1
        numbers.append(number)
        mask ^= 1 << number
    return numbers


def _digits(mask: int) -> bytes:
    """Return a byte per bit, 0 or 1, the lowest first: at 1,000 bits 20 times faster than shifts (by hand)."""
    return f"{mask:b}".encode().translate(_DIGITS)[::-1]


class ReplicaBits:
    """Names by bit. A bit belongs to its name until it is released."""

    def __init__(self) -> None:
        self._names: list[str] = []
        """An empty name marks a free bit."""
        self._named: dict[int, list[str]] = {}
        """Answers of `names_of` since the last release of a bit."""

    @property
    def names(self) -> list[str]:
        """Names by the number of the bit; empty for a free bit."""
        return list(self._names)

    def allocate(self, name: str) -> int:
        """Allocate the lowest free bit to `name`. Return its number."""
        if "" in self._names:
            number = self._names.index("")
            self._names[number] = name
        else:
            number = len(self._names)
            self._names.append(name)
        return number

    def release(self, mask: int) -> None:
        """Free the bits of `mask`, which no mask contains any more."""
        for number in bits(mask):
            self._names[number] = ""
        self._named.clear()

    def names_of(self, mask: int) -> list[str]:
        """Return the names of the bits in `mask`, in any order. The result is cached and must not be changed."""
        found = self._named.get(mask)
        if found is None:
            if mask.bit_count() > FEW_BITS:
                return list(compress(self._names, _digits(mask)))
            if len(self._named) == NAMED_MAX:
                self._named.clear()
            found = self._named[mask] = [self._names[number] for number in bits(mask)]
        return found


class SharedMasks:
    """Interns masks: equal masks are one object, so that the size of a block does not depend on the number of replicas.

    `known` maps each mask to itself. CPython's reference counts tell which masks no block uses any more. A separate count
    would have to be kept at every change of a block.
    """

    def __init__(self) -> None:
        self.known: dict[int, int] = {}
        self._limit = MASKS_MIN

    @property
    def needs_purge(self) -> bool:
        """Return True if there may be many unused masks."""
        return len(self.known) > self._limit

    def purge(self) -> Iterator[None]:
        """Forget the unused masks, slice by slice."""
        known = self.known
        left = list(known)
        while left:
            for _ in range(min(len(left), PURGE_MASKS)):
                mask = left.pop()
                if sys.getrefcount(mask) == _UNUSED:
                    del known[mask]
            yield
        self._limit = max(MASKS_MIN, 2 * len(known))


_UNUSED: Final = 4
"""References to a mask that no block has: key, value, the loop's variable and the argument."""
