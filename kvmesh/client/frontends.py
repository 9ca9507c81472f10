"""Which frontend a stream goes to: spread over those that work, away from one that just failed, back when it answers.

Pure. A frontend is GOOD until a stream or a probe fails there; then it rests, longer each time; after the rest it is
TRIED by a probe, which costs no request, and is GOOD again when that is answered.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

OPEN_MIN_S: Final = 0.25
OPEN_MAX_S: Final = 5.0
"""Rests of a frontend that failed: doubled with each failure in a row."""


@dataclass(slots=True)
class _FrontendState:
    streams: int = 0
    failures: int = 0
    """In a row; 0: it works."""
    open_until_s: float = 0.0
    is_probed: bool = False


class Frontends:
    """The addresses a client knows. Invariant: the same addresses for its whole life; streams >= 0."""

    def __init__(self, addresses: Sequence[str], draw: random.Random) -> None:
        """Raises ValueError unless every address is "host:port" and there is at least one."""
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
        """Return a frontend: of those that work the one with the fewest streams; else the one that has rested most.

        `avoid` is taken only if there is no other.
        """
        return min(self._states, key=lambda each: (each == avoid, *self._rank(self._states[each])))

    def has_other(self, address: str) -> bool:
        """True if a frontend other than `address` works."""
        return any(not state.failures for each, state in self._states.items() if each != address)

    def to_probe(self, now_s: float) -> list[str]:
        """Return the frontends that have rested and shall be asked now; `on_answer` or `on_failure` follows for each."""
        due = [
            each
            for each, state in self._states.items()
            if state.failures and not state.is_probed and now_s >= state.open_until_s
        ]
        for each in due:
            self._states[each].is_probed = True
        return due

    def on_open(self, address: str) -> None:
        """A stream goes there."""
        self._states[address].streams += 1

    def on_close(self, address: str) -> None:
        """A stream is over."""
        state = self._states[address]
        assert state.streams > 0, f"{address} has no stream to close"
        state.streams -= 1

    def on_answer(self, address: str) -> None:
        """It said something."""
        state = self._states[address]
        state.failures, state.is_probed = 0, False

    def on_failure(self, address: str, now_s: float) -> None:
        """A stream or a probe failed there. Many that fail together count as one."""
        state = self._states[address]
        if not state.failures or state.is_probed or now_s >= state.open_until_s:
            open_s = min(OPEN_MAX_S, OPEN_MIN_S * 2 ** min(state.failures, 10))
            state.open_until_s = now_s + open_s * (0.75 + 0.5 * self._draw.random())
            state.failures += 1
        state.is_probed = False

    def on_unknown(self, address: str) -> None:
        """A probe told nothing."""
        self._states[address].is_probed = False

    def _rank(self, state: _FrontendState) -> tuple[bool, float, float]:
        if state.failures:
            return True, state.open_until_s, 0.0
        return False, state.streams, self._draw.random()
