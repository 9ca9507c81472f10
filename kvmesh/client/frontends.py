"""Choice of the frontend for a stream: load balancing over working frontends, with a circuit breaker for each. Pure.

The circuit of a frontend is closed until a stream or a probe fails there. It then opens, with exponential backoff and
jitter. After that time it is half-open: a probe, which is no request, closes the circuit if it is answered, and opens the
circuit again if not.

`Regions` chooses the region. Lost and draining frontends count there, full ones and broken calls do not.

With several regions:

- The loss of a frontend makes the others of its region suspect. They are probed at once, so that a region that does not
  answer is left after one timeout, however many frontends it has.
- A region that rests is probed until it returns. Only a frontend whose health is SERVING counts as well there.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvmesh.client.regions import Regions

OPEN_MIN_S: Final = 0.25
OPEN_MAX_S: Final = 5.0
"""Shortest and longest time of an open circuit; it doubles with each consecutive failure."""

CHECK_S: Final = 1.0
"""A frontend with a closed circuit in a resting region is probed this long after its last answer."""


class Cause(enum.Enum):
    """Cause of a failure of a frontend."""

    LOST = enum.auto()
    """The connection is refused or broken, or no answer comes."""
    DRAINING = enum.auto()
    """The frontend shuts down. Messages of its running streams do not close the circuit; a health check does."""
    FULL = enum.auto()
    """The frontend has no room for another request. It is not lost."""
    BROKEN = enum.auto()
    """gRPC itself ended the call, for example because its message is too large. A probe decides if the frontend is lost."""


_LOST: Final = frozenset({Cause.LOST, Cause.DRAINING})


@dataclass(slots=True)
class _FrontendState:
    region: str
    streams: int = 0
    failures: int = 0
    """Consecutive failures; 0: the circuit is closed."""
    cause: Cause = Cause.LOST
    """Cause of the last failure."""
    open_until_s: float = 0.0
    answered_s: float = float("-inf")
    """Time of the last message or answered probe."""
    is_probed: bool = False
    is_suspect: bool = False
    """True if another frontend of the region was lost since the last answer. The circuit is closed."""

    @property
    def is_lost(self) -> bool:
        return self.failures > 0 and self.cause in _LOST


class Frontends:
    """The addresses that a client knows, by region. INVARIANT: the addresses never change; streams >= 0."""

    def __init__(
        self,
        addresses: Mapping[str, Sequence[str]],
        draw: random.Random,
        *,
        rest_min_s: float = 10.0,
        rest_max_s: float = 300.0,
    ) -> None:
        """`addresses`: by region, the home region first, as `addresses.by_region` returns them. Rests: see `Regions`."""
        self._draw = draw
        self._by_region = {name: tuple(each) for name, each in addresses.items()}
        self._states = {
            address: _FrontendState(name) for name, each in self._by_region.items() for address in each
        }
        self.regions = Regions(self._by_region, rest_min_s, rest_max_s, draw)

    def __len__(self) -> int:
        return len(self._states)

    def region_of(self, address: str) -> str:
        """Return the region of a frontend."""
        return self._states[address].region

    def choose(self, now_s: float, avoid: str = "", barred: Collection[str] = (), session: str = "") -> str:
        """Return the frontend with the fewest streams and a closed circuit; else the one with the earliest end of backoff.

        `avoid` is chosen only if all others are lost. Frontends in the regions `barred` are left out. `session`: see
        `Regions.candidates`.
        """
        self.regions.advance(now_s)
        return min(self._candidates(barred, session), key=lambda each: self._rank(each, avoid))

    def has_other(self, address: str, barred: Collection[str] = (), session: str = "") -> bool:
        """True if the next choice, for a request that leaves `address`, is another frontend with a closed circuit."""
        return any(
            not self._states[each].failures for each in self._candidates(barred, session) if each != address
        )

    def has_sibling(self, address: str) -> bool:
        """True if another frontend of the same region has a closed circuit."""
        siblings = self._by_region[self._states[address].region]
        return any(not self._states[each].failures for each in siblings if each != address)

    def to_probe(self, now_s: float) -> list[str]:
        """Return the frontends to probe now; `on_probe`, `on_failure` or `on_unknown` must follow for each."""
        due = [
            each for each, state in self._states.items() if not state.is_probed and self._is_due(state, now_s)
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

    def on_answer(self, address: str, now_s: float) -> None:
        """The frontend sent a message; its circuit closes, unless the frontend drains."""
        state = self._states[address]
        state.answered_s, state.is_suspect = now_s, False
        if state.failures and state.cause is not Cause.DRAINING:
            self._close(state, now_s)

    def on_probe(self, address: str, now_s: float, *, is_serving: bool) -> None:
        """The frontend answered a probe; its circuit closes. A draining or resting one must have the health SERVING."""
        state = self._states[address]
        needs_serving = self.regions.is_resting(state.region) or state.cause is Cause.DRAINING
        if needs_serving and not is_serving:
            self.on_failure(address, now_s, state.cause if state.failures else Cause.DRAINING)
        else:
            state.answered_s, state.is_suspect = now_s, False
            self._close(state, now_s)

    def on_failure(self, address: str, now_s: float, cause: Cause = Cause.LOST) -> None:
        """A stream or a probe failed; the circuit opens. Failures at the same time count as one."""
        state = self._states[address]
        was_lost = state.is_lost
        if not state.failures or state.is_probed or now_s >= state.open_until_s:
            open_s = min(OPEN_MAX_S, OPEN_MIN_S * 2 ** min(state.failures, 10))
            state.open_until_s = now_s + open_s * (0.75 + 0.5 * self._draw.random())
            state.failures += 1
        state.is_probed = state.is_suspect = False
        state.cause = cause
        if state.is_lost and not was_lost:
            self._on_lost(state.region, now_s)
        elif was_lost and not state.is_lost:
            self.regions.on_works(state.region, now_s)

    def on_unknown(self, address: str) -> None:
        """A probe had no usable result."""
        self._states[address].is_probed = False

    def _close(self, state: _FrontendState, now_s: float) -> None:
        state.failures, state.is_probed, state.cause = 0, False, Cause.LOST
        self.regions.on_works(state.region, now_s)

    def _on_lost(self, region: str, now_s: float) -> None:
        states = [self._states[each] for each in self._by_region[region]]
        if all(state.is_lost for state in states):
            self.regions.on_lost(region, now_s)
        elif len(self._by_region) > 1:
            for state in states:
                state.is_suspect = not state.failures

    def _is_due(self, state: _FrontendState, now_s: float) -> bool:
        if state.failures:
            return now_s >= state.open_until_s
        is_checked = self.regions.is_resting(state.region) and now_s - state.answered_s >= CHECK_S
        return state.is_suspect or is_checked

    def _candidates(self, barred: Collection[str], session: str) -> Iterator[str]:
        for region in self.regions.candidates(barred, session):
            yield from self._by_region[region]

    def _rank(self, address: str, avoid: str) -> tuple[bool, bool, bool, float, float]:
        state = self._states[address]
        if state.failures:
            return state.is_lost, address == avoid, True, state.open_until_s, 0.0
        return False, address == avoid, False, state.streams, self._draw.random()
