"""Decides which control process a receiver dials, and when. Pure.

A receiver dials any control process. One that does not lead names the leader, and the receiver dials that address next.
Failures are followed by a growing pause with jitter (exponential backoff). While Redis is unavailable, the addresses
known last stay in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

BACKOFF_MIN_S: Final = 0.1
BACKOFF_MAX_S: Final = 2.0
"""Bounds of the pause between two dials, before jitter: 0.5 to 1 times the pause."""

STABLE_S: Final = 3.0
"""After a stream to a leader that lasted this long, the pause begins at its lower bound again."""

HOPS_MAX: Final = 3
"""Addresses of leaders that are followed without a pause. Two processes that name each other cause no busy loop."""


class LeaderSearch:
    """The search of one receiver. `chance` returns a random number in [0, 1)."""

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance
        self._listed: tuple[str, ...] = ()
        self._at = int(chance() * (1 << 16))
        """Position in the list. Receivers begin at different ones."""
        self._hint = ""
        """Address of the leader, as another control process said."""
        self._hops = 0
        self._failures = 0
        self._next_s = float("-inf")

    def __repr__(self) -> str:
        return f"LeaderSearch({list(self._listed)}, hint {self._hint!r}, {self._failures} failures)"

    def take(self, addresses: Sequence[str]) -> None:
        """Take the addresses of the live control processes."""
        self._listed = tuple(addresses)

    def next_address(self) -> str:
        """Return the address to dial at `next_s`. Empty: no control process is known."""
        if self._hint:
            return self._hint
        return self._listed[self._at % len(self._listed)] if self._listed else ""

    @property
    def next_s(self) -> float:
        """Time before which nothing is dialled."""
        return self._next_s

    def on_redirected(self, leader_address: str, now_s: float) -> None:
        """Note that the dialled process does not lead. `leader_address`: empty if it knows no leader."""
        if leader_address and self._hops < HOPS_MAX:
            self._hint, self._next_s = leader_address, now_s
            self._hops += 1
        else:
            self._fail(now_s)

    def on_lost(self, now_s: float, led_s: float) -> None:
        """Note that a dial failed or a stream ended. `led_s`: how long the stream was one to a leader."""
        if led_s >= STABLE_S:
            self._failures = 0
        self._fail(now_s)

    def _fail(self, now_s: float) -> None:
        if not self._hint:
            self._at += 1
        self._hint, self._hops = "", 0
        pause_s = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** min(self._failures, 16))
        self._failures += 1
        self._next_s = now_s + pause_s * (0.5 + 0.5 * self._chance())
