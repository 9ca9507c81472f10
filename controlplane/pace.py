"""Limits the rate of one receiver's messages by backpressure: the next message is read later. Pure."""

from __future__ import annotations

from typing import Final

MESSAGES_PER_S: Final = 20.0
BYTES_PER_S: Final = float(4 << 20)
"""Rates of a stream. A receiver of this release sends some three messages a second."""

BURST_S: Final = 5.0
"""Seconds of these rates that a stream may send at once."""


class Pace:
    """A token bucket of messages and bytes, both counted in seconds of their rate."""

    def __init__(self, now_s: float) -> None:
        self._free_s = now_s - BURST_S
        """Time at which the messages so far would have been sent at the full rate."""

    def delay_s(self, size_bytes: int, now_s: float) -> float:
        """Take a message of `size_bytes`; return the seconds to wait before the next one is read."""
        cost_s = max(1 / MESSAGES_PER_S, size_bytes / BYTES_PER_S)
        self._free_s = max(self._free_s, now_s - BURST_S) + cost_s
        return max(0.0, self._free_s - now_s)
