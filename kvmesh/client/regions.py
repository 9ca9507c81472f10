"""Choice of the region for new streams: the home region while it works, another one otherwise, and back after a rest. Pure.

    SERVING ── all frontends lost ──► RESTING ── works during its whole rest ──► SERVING

A region works while a frontend of it is not lost. A full frontend is not lost: load never moves a stream to another region.
The rest is hysteresis: it starts when a lost region works again, and starts anew when the region is lost again. It has
jitter, so that clients do not return together. It doubles if the region is lost soon after a rest, up to a bound.

While home is lost, sessions are spread over the other regions by rendezvous hashing: no region takes all of them, and a
conversation that moves finds its blocks in one region again. A choice by load would scatter its turns over the cold caches
of several regions. Without a session the order of the regions, which the caller gives, decides.

INVARIANT: a region that is not RESTING works. `current` works if any region does; a RESTING region is used if no other
works. The choice leaves a region that works only for a SERVING one earlier in the order.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

SOON_RESTS: Final = 10.0
"""A region that is lost within this many rests after its return gets a rest that is twice as long."""

JITTER: Final = 0.5
"""Largest random part of a rest, as a share of the rest."""


@dataclass(slots=True)
class _RegionState:
    order: int
    works: bool = True
    is_resting: bool = False
    base_s: float = 0.0
    """The last rest without its jitter."""
    rest_s: float = 0.0
    """The last rest with its jitter: base_s <= rest_s <= (1 + JITTER) * base_s."""
    works_since_s: float = float("-inf")
    serving_since_s: float = float("-inf")
    """End of the last rest."""


class Regions:
    """See the module. `names`: the home region first. A rest lasts `rest_min_s` to `rest_max_s`, plus its jitter."""

    def __init__(
        self, names: Iterable[str], rest_min_s: float, rest_max_s: float, draw: random.Random
    ) -> None:
        self._states = {name: _RegionState(order) for order, name in enumerate(names)}
        self._rest_min_s, self._rest_max_s = rest_min_s, rest_max_s
        self._draw = draw
        self._home = next(iter(self._states))
        self.current = self._home
        """The region for new streams without a session; for all of them if it is the home region."""

    def is_resting(self, name: str) -> bool:
        """True if the region was lost and its rest is not over. A client with one region has no rests."""
        return len(self._states) > 1 and self._states[name].is_resting

    def works(self, name: str) -> bool:
        """True if a frontend of the region is not lost."""
        return self._states[name].works

    def candidates(self, barred: Collection[str] = (), session: str = "") -> tuple[str, ...]:
        """Return the region for a request that is not sent to the regions `barred`.

        `session` spreads requests over the other regions while home is lost; empty: the order decides. If no other region
        works, all others are returned. If all regions are barred, `barred` is ignored.
        """
        open_to_it = [name for name in self._states if name not in barred] or list(self._states)
        if self.current in open_to_it and (not session or self.current == self._home):
            best = self.current
        elif session:
            least = min(self._rank(name)[:2] for name in open_to_it)
            best = max(
                (name for name in open_to_it if self._rank(name)[:2] == least),
                key=lambda name: _score(session, name),
            )
        else:
            best = min(open_to_it, key=self._rank)
        return (best,) if self._states[best].works else tuple(open_to_it)

    def on_lost(self, name: str, now_s: float) -> None:
        """Every frontend of the region is lost."""
        state = self._states[name]
        if not state.is_resting:
            is_soon = now_s - state.serving_since_s < SOON_RESTS * state.base_s
            state.base_s = min(self._rest_max_s, 2 * state.base_s) if is_soon else self._rest_min_s
            state.rest_s = state.base_s * (1 + JITTER * self._draw.random())
            state.is_resting = True
        state.works = False
        self._choose()

    def on_works(self, name: str, now_s: float) -> None:
        """A frontend of the region is not lost any more."""
        state = self._states[name]
        if not state.works:
            state.works, state.works_since_s = True, now_s
            self._choose()

    def advance(self, now_s: float) -> None:
        """End the rests that are over."""
        for state in self._states.values():
            if state.is_resting and state.works and now_s - state.works_since_s >= state.rest_s:
                state.is_resting, state.serving_since_s = False, now_s
        self._choose()

    def _choose(self) -> None:
        best, at = min(self._states, key=self._rank), self._states[self.current]
        state = self._states[best]
        is_earlier = not state.is_resting and state.order < at.order
        if state.works and (is_earlier or not at.works):
            self.current = best

    def _rank(self, name: str) -> tuple[bool, bool, int]:
        state = self._states[name]
        return not state.works, state.is_resting, state.order


def _score(session: str, name: str) -> bytes:
    """Return the rank of a region for a session (rendezvous hashing)."""
    return hashlib.blake2b(f"{len(name)}:{name}{session}".encode(), digest_size=8).digest()
