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


def shortlist(
    replicas: Sequence[ReplicaState],
    mirror: PrefixMirror,
    hashes: Sequence[int],
    load: Mapping[str, float],
    rng: random.Random,
) -> list[Entry]:
    """Return whom to compare. `load`: what the least loaded are ordered by; who is not in it has none."""
    if len(replicas) <= ALL:
        depths = mirror.matched(hashes)
        return [(one, depths.get(one.name, 0)) for one in replicas]
    by_name = {one.name: one for one in replicas}
    chosen: dict[str, int] = {}
    for depth, mask in mirror.groups(hashes):
        names = [name for name in mirror.names_of(mask) if name in by_name]
        for name in _lightest(names, HOLDERS - len(chosen), load, rng):
            chosen[name] = depth
        if len(chosen) >= HOLDERS:
            break
    light = _lightest([one.name for one in window(replicas, rng)], LIGHT, load, rng)
    missing = [name for name in light if name not in chosen]
    chosen.update(_depths(missing, mirror, hashes))
    return [(by_name[name], depth) for name, depth in chosen.items()]


def window(replicas: Sequence[ReplicaState], rng: random.Random) -> Sequence[ReplicaState]:
    """Return WINDOW neighbours from a random one on: as good as a sample, and cheap."""
    if len(replicas) <= WINDOW:
        return replicas
    start = rng.randrange(len(replicas))
    found = replicas[start : start + WINDOW]
    return [*found, *replicas[: WINDOW - len(found)]] if len(found) < WINDOW else found


def _lightest(names: list[str], count: int, load: Mapping[str, float], rng: random.Random) -> list[str]:
    if len(names) > WINDOW:
        start = rng.randrange(len(names))
        names = (names[start:] + names[:start])[:WINDOW]
    if len(names) <= count:
        return names
    return nsmallest(count, names, key=lambda name: load.get(name, 0.0))


def _depths(names: list[str], mirror: PrefixMirror, hashes: Sequence[int]) -> dict[str, int]:
    """Return the depths of `names`: of few replicas a group's mask is asked, not named."""
    depths = dict.fromkeys(names, 0)
    bits = {name: mirror.bit_of(name) for name in names}
    for depth, mask in mirror.groups(hashes):
        for name, bit in bits.items():
            if mask & bit:
                depths[name] = depth
    return depths
