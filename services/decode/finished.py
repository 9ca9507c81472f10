"""Token logs that were sent to their end, kept for a stream takeover. Pure.

A finish row in flight is lost with the router that carried it; the kept log lets a takeover read it again. A log is dropped
after `detached_s`. The bounds here hold however many streams end within that time.
"""

from __future__ import annotations

from typing import Final

from services.decode.slot import DecodeSlot

LOGS_MAX: Final = 4096
BYTES_MAX: Final = 16 << 20


class FinishedLogs:
    """Finished slots, oldest first. The log of a kept slot does not change.

    INVARIANT: at most `logs_max` logs, and at most `bytes_max` together unless a single log is larger.
    """

    __slots__ = ("_bytes_max", "_logs_max", "_slots", "size_bytes")

    def __init__(self, logs_max: int = LOGS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._logs_max = logs_max
        self._bytes_max = bytes_max
        self._slots: dict[DecodeSlot, int] = {}
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, slot: DecodeSlot) -> bool:
        return slot in self._slots

    def add(self, slot: DecodeSlot) -> list[DecodeSlot]:
        """Keep `slot`; return the evicted slots, oldest first."""
        self._slots[slot] = slot.log.size_bytes
        self.size_bytes += slot.log.size_bytes
        forgotten: list[DecodeSlot] = []
        while len(self._slots) > 1 and (
            len(self._slots) > self._logs_max or self.size_bytes > self._bytes_max
        ):
            oldest = next(iter(self._slots))
            self.discard(oldest)
            forgotten.append(oldest)
        return forgotten

    def discard(self, slot: DecodeSlot) -> None:
        """Drop `slot`; an unknown slot is ignored."""
        self.size_bytes -= self._slots.pop(slot, 0)

    def assert_consistent(self) -> None:
        """Raise AssertionError if a bound or a count does not hold."""
        assert self.size_bytes == sum(slot.log.size_bytes for slot in self._slots), self.size_bytes
        assert len(self._slots) <= max(1, self._logs_max), len(self._slots)
        assert len(self._slots) <= 1 or self.size_bytes <= self._bytes_max, self.size_bytes
