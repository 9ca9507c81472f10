"""Which replicas a request is worth comparing at: all of them, or of many the deepest holders and some of the least loaded.

Pure; randomness is injected. A decision must not cost more than placing badly would: of a thousand replicas a handful is
looked at closely. Who holds nothing and has much work cannot be the best.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from heapq import nsmallest
from typing import Final

from services.router.mirror import PrefixMirror
from services.router.policy import ReplicaState

ALL: Final = 16
"""Up to this many replicas are all compared."""

HOLDERS: Final = 8
"""Holders of the prompt's blocks that are compared, the deepest first; of equals the least loaded."""

LIGHT: Final = 6
"""Least loaded replicas that are compared, whatever they hold."""

WINDOW: Final = 48
"""Replicas among which the least loaded are looked for: the best of so many is among the lightest percents."""

Entry = tuple[ReplicaState, int]
"""A replica, and how many of the prompt's blocks it has or will have."""


class Match:
    """Who holds how much of one prompt; looked up once, when it is first asked for."""

    def __init__(self, mirror: PrefixMirror, hashes: Sequence[int]) -> None:
        self._mirror = mirror
        self.groups = mirror.groups(hashes)
        self._depths: dict[str, int] | None = None

    def depths(self) -> dict[str, int]:
        """Return the blocks held by all that hold one."""
        if self._depths is None:
            names_of = self._mirror.names_of
            self._depths = {name: depth for depth, mask in self.groups for name in names_of(mask)}
        return self._depths

    def names(self, mask: int) -> list[str]:
        """Return the names in the mask of a group."""
        return self._mirror.names_of(mask)

    def depths_of(self, names: list[str]) -> dict[str, int]:
        """Return the blocks that `names` hold: few are looked for in the masks, which need not be named for it."""
        depths = dict.fromkeys(names, 0)
        if self.groups:
            bits = [(name, self._mirror.bit_of(name)) for name in names]
            for depth, mask in self.groups:
                for name, bit in bits:
                    if mask & bit:
                        depths[name] = depth
        return depths


def shortlist(
    replicas: Sequence[ReplicaState], match: Match, load: Mapping[str, float], rng: random.Random
) -> list[Entry]:
    """Return whom to compare. `load`: what the least loaded are ordered by; who is not in it has none."""
    if len(replicas) <= ALL:
        depths = match.depths()
        return [(one, depths.get(one.name, 0)) for one in replicas]
    by_name = {one.name: one for one in replicas}
    chosen: dict[str, int] = {}
    for depth, mask in match.groups:
        names = [name for name in match.names(mask) if name in by_name]
        for name in _lightest(names, HOLDERS - len(chosen), load, rng):
            chosen[name] = depth
        if len(chosen) >= HOLDERS:
            break
    light = _lightest([one.name for one in window(replicas, rng)], LIGHT, load, rng)
    chosen.update(match.depths_of([name for name in light if name not in chosen]))
    return [(by_name[name], depth) for name, depth in chosen.items()]


def below(count: int, rng: random.Random) -> int:
    """Return one of the numbers below `count`: as `rng.randrange` does, in a third of the time."""
    bits, draw = count.bit_length(), rng.getrandbits
    number = draw(bits)
    while number >= count:
        number = draw(bits)
    return number


def window(replicas: Sequence[ReplicaState], rng: random.Random) -> Sequence[ReplicaState]:
    """Return WINDOW neighbours from a random one on: as good as a sample, and cheap."""
    if len(replicas) <= WINDOW:
        return replicas
    start = below(len(replicas), rng)
    found = replicas[start : start + WINDOW]
    return [*found, *replicas[: WINDOW - len(found)]] if len(found) < WINDOW else found


def _lightest(names: list[str], count: int, load: Mapping[str, float], rng: random.Random) -> list[str]:
    if len(names) > WINDOW:
        start = below(len(names), rng)
        names = (names[start:] + names[:start])[:WINDOW]
    if len(names) <= count or not load:
        return names[:count]
    return nsmallest(count, names, key=lambda name: load.get(name, 0.0))
