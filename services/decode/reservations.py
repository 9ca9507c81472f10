"""KV blocks reserved for accepted slots. Pure."""

from __future__ import annotations


class Reservations:
    """Counts reserved blocks against the engine's total.

    INVARIANT: 0 <= reserved <= total. Cached blocks need no reservation: the engine evicts them for reserved ones.
    """

    __slots__ = ("reserved", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.reserved = 0

    @property
    def free(self) -> int:
        """Blocks that are not reserved."""
        return self.total - self.reserved

    def can_reserve(self, blocks: int, headroom: int = 0) -> bool:
        """True if `blocks` more can be reserved while `headroom` blocks stay free beside them."""
        return blocks + headroom <= self.free

    def reserve(self, blocks: int) -> None:
        """Reserve `blocks`. Raises ValueError if they do not fit."""
        if not self.can_reserve(blocks):
            raise ValueError(f"{blocks} blocks do not fit: {self.reserved}/{self.total} are reserved")
        self.reserved += blocks

    def release(self, blocks: int) -> None:
        """Release reserved `blocks`. Raises ValueError for more than are reserved."""
        if not 0 <= blocks <= self.reserved:
            raise ValueError(f"{blocks} blocks were never reserved: {self.reserved} are")
        self.reserved -= blocks
