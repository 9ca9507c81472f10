"""KV blocks promised to accepted slots. Pure."""

from __future__ import annotations


class Reservations:
    """Counts promised blocks against the engine's.

    Invariant: 0 <= reserved <= total. Cached blocks need no room here: the engine evicts them for whoever holds a promise.
    """

    __slots__ = ("reserved", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.reserved = 0

    @property
    def free(self) -> int:
        """Blocks that are not promised."""
        return self.total - self.reserved

    def can_reserve(self, blocks: int, headroom: int = 0) -> bool:
        """True if `blocks` more can be promised and `head_room` stay free beside them."""
        return blocks + headroom <= self.free

    def reserve(self, blocks: int) -> None:
        """Promise `blocks`. Raises ValueError unless they can be reserved."""
        if not self.can_reserve(blocks):
            raise ValueError(f"{blocks} blocks do not fit: {self.reserved}/{self.total} are reserved")
        self.reserved += blocks

    def release(self, blocks: int) -> None:
        """Take a promise back."""
        if not 0 <= blocks <= self.reserved:
            raise ValueError(f"{blocks} blocks were never reserved: {self.reserved} are")
        self.reserved -= blocks
