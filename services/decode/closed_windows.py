"""Slots whose client's flow-control window is closed, and which of them is cut when they hold too many.

Pure. Such a slot holds a place in the replica while its engine idles, and a place in the engine while that generates what
is not read. INVARIANT: at most half of a replica's places, at least one, are of this kind after each `close`. Only what a
frontend reports counts: in a partition no report comes, and nothing is cut.
"""

from __future__ import annotations

from services.decode.slot import Slot


class ClosedWindows:
    """The slots, longest closed first."""

    __slots__ = ("_closed", "slots_max")

    def __init__(self, places: int) -> None:
        """`places`: all slots of the replica, or what its engine runs at once if that is less."""
        self.slots_max = max(1, places // 2)
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
