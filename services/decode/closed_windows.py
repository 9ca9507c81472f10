"""Slots whose client's flow-control window is closed, and which of them is cut when they hold too many.

Pure. Such a slot holds its place while its engine idles. INVARIANT: at most half of a replica's slots, at least one, are
of this kind after each `close`. Only what a frontend reports counts: in a partition no report comes, and nothing is cut.
"""

from __future__ import annotations

from services.decode.slot import Slot


class ClosedWindows:
    """The slots, longest closed first."""

    __slots__ = ("_closed", "slots_max")

    def __init__(self, slots_max: int) -> None:
        """`slots_max`: all slots of the replica."""
        self.slots_max = max(1, slots_max // 2)
        """Slots that may be of this kind."""
        self._closed: dict[Slot, None] = {}

    def __len__(self) -> int:
        return len(self._closed)

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._closed

    def close(self, slot: Slot) -> Slot | None:
        """Count `slot`; return the longest closed one if they are too many. That one is counted no longer."""
        self._closed.setdefault(slot)
        if len(self._closed) <= self.slots_max:
            return None
        longest = next(iter(self._closed))
        del self._closed[longest]
        return longest

    def open(self, slot: Slot) -> None:
        """Count `slot` no longer; one that is not counted is ignored."""
        self._closed.pop(slot, None)

    def assert_consistent(self) -> None:
        """Raise AssertionError if there are too many, or one is not read by anybody."""
        assert len(self._closed) <= self.slots_max, self._closed
        for slot in self._closed:
            assert slot.session is not None, slot
