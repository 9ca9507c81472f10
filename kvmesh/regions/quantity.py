"""Load, capacity and headroom of a region in uncached prefill tokens/s and KV blocks. Pure.

Requests are no measure between regions: a moved prompt finds no prefix in the cache of its target.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec


class Quantity(msgspec.Struct, frozen=True):
    """An amount in both dimensions. Only `fits` and `share_of` compare amounts: they have no total order."""

    tokens_per_s: float = 0.0
    """Uncached prefill tokens/s, at least 0."""
    blocks: float = 0.0
    """KV blocks in use at the same time, at least 0."""

    def __add__(self, other: Quantity) -> Quantity:
        return Quantity(self.tokens_per_s + other.tokens_per_s, self.blocks + other.blocks)

    def __sub__(self, other: Quantity) -> Quantity:
        """Return the remainder; a dimension of which more is taken than is there has none left."""
        return Quantity(
            max(0.0, self.tokens_per_s - other.tokens_per_s), max(0.0, self.blocks - other.blocks)
        )

    def __mul__(self, factor: float) -> Quantity:
        return Quantity(self.tokens_per_s * factor, self.blocks * factor)

    def least(self, other: Quantity) -> Quantity:
        """Return the smaller amount of each dimension."""
        return Quantity(min(self.tokens_per_s, other.tokens_per_s), min(self.blocks, other.blocks))

    def most(self, other: Quantity) -> Quantity:
        """Return the larger amount of each dimension."""
        return Quantity(max(self.tokens_per_s, other.tokens_per_s), max(self.blocks, other.blocks))

    def fits(self, room: Quantity) -> bool:
        """True if `room` covers this amount in both dimensions, up to rounding."""
        return _fits(self.tokens_per_s, room.tokens_per_s) and _fits(self.blocks, room.blocks)

    def share_of(self, whole: Quantity) -> float:
        """Return this amount as a share of `whole`, in the fuller dimension. Infinite if `whole` lacks it."""
        return max(_share(self.tokens_per_s, whole.tokens_per_s), _share(self.blocks, whole.blocks))

    def cover_of(self, load: Quantity) -> float:
        """Return the largest share of `load`, at most 1, that fits into this amount."""
        share = load.share_of(self)
        return 1.0 if share <= 1.0 else 1.0 / share

    @property
    def is_zero(self) -> bool:
        """True if both dimensions are 0."""
        return self.tokens_per_s == 0 and self.blocks == 0

    @property
    def is_valid(self) -> bool:
        """True if both dimensions are finite and at least 0: amounts of other processes are checked before use."""
        return all(math.isfinite(each) and each >= 0 for each in (self.tokens_per_s, self.blocks))

    def __str__(self) -> str:
        return f"{self.tokens_per_s:,.0f} tokens/s and {self.blocks:,.0f} blocks"


NOTHING = Quantity()


def total(amounts: Iterable[Quantity]) -> Quantity:
    """Return the sum of `amounts`."""
    tokens_per_s = blocks = 0.0
    for each in amounts:
        tokens_per_s += each.tokens_per_s
        blocks += each.blocks
    return Quantity(tokens_per_s, blocks)


ROUNDING = 1e-9
"""Relative error that sums of amounts may have."""


def _fits(amount: float, room: float) -> bool:
    return amount <= room + ROUNDING * max(1.0, room)


def _share(amount: float, whole: float) -> float:
    if amount <= 0:
        return 0.0
    return amount / whole if whole > 0 else math.inf
