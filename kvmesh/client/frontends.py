"""Choice of the frontend for a stream: load balancing over working frontends, with a circuit breaker for each. Pure.

The circuit of a frontend is closed until a stream or a probe fails there. It then opens, with exponential backoff and
jitter. After that time it is half-open: a probe, which is no request, closes the circuit if it is answered, and opens the
circuit again if not.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

OPEN_MIN_S: Final = 0.25
OPEN_MAX_S: Final = 5.0
"""Shortest and longest time of an open circuit; it doubles with each consecutive failure."""


@dataclass(slots=True)
class _FrontendState:
    streams: int = 0
    failures: int = 0
    """Consecutive failures; 0: the circuit is closed."""
    open_until_s: float = 0.0
    is_probed: bool = False


class Frontends:
    """The addresses that a client knows. INVARIANT: the addresses never change; streams >= 0."""

    def __init__(self, addresses: Sequence[str], draw: random.Random) -> None:
        """Raise ValueError if there is no address, or if an address is not "host:port"."""
        if not addresses:
            raise ValueError("addresses is empty: 1 frontend or more is needed")
        for address in addresses:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 1 <= int(port) <= 65_535:
                raise ValueError(f"address is {address!r}: host:port with a port of 1 to 65535 is allowed")
        self._draw = draw
        self._states = {address: _FrontendState() for address in dict.fromkeys(addresses)}

    def __len__(self) -> int:
        return len(self._states)

    def choose(self, avoid: str = "") -> str:
        """Return the frontend with the fewest streams and a closed circuit; else the one with the earliest end of backoff.

        `avoid` is chosen only if there is no other.
        """
        return min(self._states, key=lambda each: (each == avoid, *self._rank(self._states[each])))

    def has_other(self, address: str) -> bool:
        """True if a frontend other than `address` has a closed circuit."""
        return any(not state.failures for each, state in self._states.items() if each != address)

    def to_probe(self, now_s: float) -> list[str]:
        """Return the half-open frontends to probe now; `on_answer`, `on_failure` or `on_unknown` must follow for each."""
        due = [
            each
            for each, state in self._states.items()
            if state.failures and not state.is_probed and now_s >= state.open_until_s
        ]
        for each in due:
            self._states[each].is_probed = True
        return due

    def on_open(self, address: str) -> None:
        """A stream to `address` was opened."""
        self._states[address].streams += 1

    def on_close(self, address: str) -> None:
        """A stream to `address` has ended."""
        state = self._states[address]
        assert state.streams > 0, f"{address} has no stream to close"
        state.streams -= 1

    def on_answer(self, address: str) -> None:
        """The frontend sent a message or answered a probe; its circuit closes."""
        state = self._states[address]
        state.failures, state.is_probed = 0, False

    def on_failure(self, address: str, now_s: float) -> None:
        """A stream or a probe failed; the circuit opens. Failures at the same time count as one."""
        state = self._states[address]
        if not state.failures or state.is_probed or now_s >= state.open_until_s:
            open_s = min(OPEN_MAX_S, OPEN_MIN_S * 2 ** min(state.failures, 10))
            state.open_until_s = now_s + open_s * (0.75 + 0.5 * self._draw.random())
            state.failures += 1
        state.is_probed = False

    def on_unknown(self, address: str) -> None:
        """A probe had no usable result."""
        self._states[address].is_probed = False

    def _rank(self, state: _FrontendState) -> tuple[bool, float, float]:
        if state.failures:
            return True, state.open_until_s, 0.0
        return False, state.streams, self._draw.random()
