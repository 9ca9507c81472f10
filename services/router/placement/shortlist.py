"""Shortlist of the replicas to compare: all, or among many the deepest holders and some of the least loaded.

Pure; randomness is injected. A decision must not take longer than a bad placement would delay the request. Among a
thousand replicas it compares a handful. A replica without any block of the prompt and with much work cannot be best.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Final

from services.router.index.local_index import LocalPrefixIndex
from services.router.index.prefix_lookup import Group
from services.router.placement.policy import ReplicaState

COMPARE_ALL_MAX: Final = 16
"""Up to this many replicas are all compared."""

HOLDERS: Final = 8
"""Compared holders of the prompt's blocks. Half of them are the least loaded of the deepest, half of the rest those of the
next deepest, and so on. The deepest may all be busy while a replica with one block less is idle."""

LEAST_LOADED: Final = 6
"""Compared least loaded replicas, whatever blocks they hold."""

WINDOW: Final = 48
"""Replicas among which the least loaded are searched. The best of 48 is on average among the lightest 2 % of all."""

_NONE: Final = repeat(0)

Entry = tuple[ReplicaState, int]
"""A replica, and how many of the prompt's blocks it has or will have."""


class Match:
    """The replicas' matched blocks of one prompt. The lookup runs once, on first use."""

    def __init__(self, local_index: LocalPrefixIndex, hashes: Sequence[int]) -> None:
        self._local_index = local_index
        self.groups = groups = local_index.groups(hashes)
        self.deepest = groups[0].depth if groups else 0
        """Blocks held by the deepest holder."""
        self._depths: dict[str, int] | None = None
        self._names: dict[int, list[str]] = {}
        """By depth, because both roles ask for the same groups."""

    def depths(self) -> dict[str, int]:
        """Return the number of blocks of each holder."""
        if self._depths is None:
            self._depths = {}
            for depth, mask in self.groups:
                self._depths.update(dict.fromkeys(self._local_index.names_of(mask), depth))
        return self._depths

    def names(self, group: Group) -> list[str]:
        """Return the names in the mask of one of `groups`."""
        names = self._names.get(group.depth)
        if names is None:
            names = self._names[group.depth] = self._local_index.names_of(group.mask)
        return names

    def depths_of(self, names: list[str]) -> dict[str, int]:
        """Return the blocks that `names` hold. Few names are looked up in the masks, without naming all holders."""
        depths = dict.fromkeys(names, 0)
        if self.groups:
            bits = [(name, self._local_index.bit_of(name)) for name in names]
            for depth, mask in self.groups:
                for name, bit in bits:
                    if mask & bit:
                        depths[name] = depth
        return depths


class Shortlist:
    """Chooses the replicas of one role to compare. Caches them by name while views have the same sequence of replicas."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._replicas: Sequence[ReplicaState] = ()
        self._by_name: dict[str, ReplicaState] = {}

    def of(self, replicas: Sequence[ReplicaState], match: Match, load: Mapping[str, float]) -> list[Entry]:
        """Return the replicas to compare. `load`: orders the least loaded; an absent replica has no load."""
        by_name, rng = self._named(replicas), self._rng
        if len(replicas) <= COMPARE_ALL_MAX:
            return [*zip(replicas, map(match.depths().get, by_name, _NONE), strict=True)]
        chosen: dict[str, int] = {}
        left = HOLDERS
        for group in match.groups:
            names = list(filter(by_name.__contains__, match.names(group)))
            for name in _lightest(names, left if group is match.groups[-1] else (left + 1) // 2, load, rng):
                chosen[name] = group.depth
            left = HOLDERS - len(chosen)
            if not left:
                break
        light = _lightest([one.name for one in window(replicas, rng)], LEAST_LOADED, load, rng)
        chosen.update(match.depths_of([name for name in light if name not in chosen]))
        return [(by_name[name], depth) for name, depth in chosen.items()]

    def deepest(self, replicas: Sequence[ReplicaState], match: Match) -> int:
        """Return the largest number of blocks that one of `replicas` has or will have."""
        is_there = self._named(replicas).__contains__
        return next((group.depth for group in match.groups if any(map(is_there, match.names(group)))), 0)

    def _named(self, replicas: Sequence[ReplicaState]) -> dict[str, ReplicaState]:
        if replicas is not self._replicas:
            self._replicas, self._by_name = replicas, {one.name: one for one in replicas}
        return self._by_name


def random_below(count: int, rng: random.Random) -> int:
    """Return a random number below `count`, as `rng.randrange` does, in a third of its time (by hand)."""
    bits, draw = count.bit_length(), rng.getrandbits
    number = draw(bits)
    while number >= count:
        number = draw(bits)
    return number


def window(replicas: Sequence[ReplicaState], rng: random.Random) -> Sequence[ReplicaState]:
    """Return WINDOW consecutive replicas from a random one on: as good as a sample, and quicker."""
    if len(replicas) <= WINDOW:
        return replicas
    start = random_below(len(replicas), rng)
    found = replicas[start : start + WINDOW]
    return [*found, *replicas[: WINDOW - len(found)]] if len(found) < WINDOW else found


def _lightest(names: list[str], count: int, load: Mapping[str, float], rng: random.Random) -> list[str]:
    if len(names) > WINDOW or (not load and len(names) > count):
        start = random_below(len(names), rng)
        names = (names[start:] + names[:start])[:WINDOW]
    if len(names) <= count or not load:
        return names[:count]
    loads = [load.get(name, 0.0) for name in names]
    return [names[index] for index in sorted(range(len(names)), key=loads.__getitem__)[:count]]
