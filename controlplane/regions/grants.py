"""Grants: leases of the own headroom to other regions, the sources, and their split over the own routers. Pure.

First each source gets what it wants to spill now, by max-min fairness. The rest is given in proportion to the load of each
source without cache hits, so a region that dies without a warning finds its grant. No grant is above BURSTS times that
load, or above LEAST_SHARE of the headroom if that is more: a source without load can begin.

INVARIANT: grants and the floors of unheard sources sum to at most the headroom, in both dimensions. `with_rest` adds at
most its rest to unheard ones.
INVARIANT: a frozen region (it spills, or its load is high) raises no grant of a source that it hears.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from kvmesh.regions.quantity import NOTHING, Quantity

EQUAL_SHARE: Final = 0.1
"""Part of a grant that is split over the routers in equal parts: a router without load can take some."""

BURSTS: Final = 1.5
"""Largest grant as a multiple of the source's load: a grant of the mean load would refuse the bursts of random arrivals."""

LEAST_SHARE: Final = 0.1
"""Part of the headroom that a source may get whatever its load is."""

SHRINK: Final = 1.0 - 1e-12
"""Keeps sums of rounded parts inside of their whole."""


class Source(msgspec.Struct, frozen=True):
    """A region that asks for a grant."""

    wanted: Quantity = NOTHING
    """Load that it wants to spill now."""
    load: Quantity = NOTHING
    """Load of all its own callers without cache hits."""


def headroom(capacity: Quantity, own_load: Quantity, share: float) -> Quantity:
    """Return the amount that guests may use: `share` of the capacity, less the load of the own callers."""
    return capacity * share - own_load


def allot(
    room: Quantity,
    sources: Mapping[str, Source],
    unheard: Mapping[str, Quantity],
    held: Mapping[str, Quantity],
    *,
    is_frozen: bool,
) -> dict[str, Quantity]:
    """Return the grant of each source out of the headroom `room`.

    `sources`: the regions that are heard, and those that were, with their last load and no wants. `unheard`: grants of the
    latter from the time when they were heard. They are floors: kept as far as the headroom allows, before all others. The
    callers of a dead source are guests here, so its grant grows with the headroom like others.
    `held`: present grants. A frozen region raises none of a heard source.
    """
    tokens = _allotted(
        room.tokens_per_s,
        {name: (each.wanted.tokens_per_s, each.load.tokens_per_s) for name, each in sources.items()},
        {name: each.tokens_per_s for name, each in unheard.items()},
    )
    blocks = _allotted(
        room.blocks,
        {name: (each.wanted.blocks, each.load.blocks) for name, each in sources.items()},
        {name: each.blocks for name, each in unheard.items()},
    )
    grants = {name: Quantity(tokens[name], blocks[name]) for name in tokens}
    if is_frozen:
        grants = {
            name: grant if name in unheard else grant.least(held.get(name, NOTHING))
            for name, grant in grants.items()
        }
    return grants


def with_rest(
    grants: Mapping[str, Quantity], rest: Quantity, silent: Mapping[str, Source]
) -> dict[str, Quantity]:
    """Return the grants with `rest` shared by the regions of `silent`, by their load, none above BURSTS times that load."""
    loads = {name: each.load * BURSTS for name, each in silent.items()}
    wanted = {name: load - grants.get(name, NOTHING) for name, load in loads.items()}
    tokens = _filled(
        rest.tokens_per_s * SHRINK,
        {name: each.tokens_per_s for name, each in wanted.items()},
        {name: each.tokens_per_s for name, each in loads.items()},
    )
    blocks = _filled(
        rest.blocks * SHRINK,
        {name: each.blocks for name, each in wanted.items()},
        {name: each.blocks for name, each in loads.items()},
    )
    more = {name: Quantity(tokens[name], blocks[name]) for name in silent}
    return {**grants, **{name: grants.get(name, NOTHING) + more[name] for name in silent}}


def split(grant: Quantity, recent: Mapping[str, float]) -> dict[str, Quantity]:
    """Return the part of each router, in whole tokens/s and blocks. The parts sum to the grant, rounded down.

    `recent`: load of each router in tokens/s, by which guests are expected. EQUAL_SHARE of the grant is split evenly.
    """
    if not recent:
        return {}
    used = sum(recent.values())
    even = 1.0 / len(recent)
    weights = {
        router: EQUAL_SHARE * even + (1 - EQUAL_SHARE) * (use / used if used > 0 else even)
        for router, use in recent.items()
    }
    tokens = _apportioned(int(grant.tokens_per_s), weights)
    blocks = _apportioned(int(grant.blocks), weights)
    return {router: Quantity(tokens[router], blocks[router]) for router in recent}


def _allotted(
    room: float, sources: Mapping[str, tuple[float, float]], unheard: Mapping[str, float]
) -> dict[str, float]:
    floors = sum(unheard.values())
    part = min(1.0, room / floors) if floors > 0 else 1.0
    given = {name: floor * part * SHRINK for name, floor in unheard.items()}
    room = max(0.0, room - floors * part)
    loads = {
        name: max(BURSTS * load, LEAST_SHARE * room) - given.get(name, 0.0)
        for name, (_, load) in sources.items()
    }
    wants = {name: min(wanted, loads[name]) for name, (wanted, _) in sources.items()}
    first = _filled(room, wants, dict.fromkeys(wants, 1.0))
    rest = {name: load - first[name] for name, load in loads.items()}
    second = _filled(room - sum(first.values()), rest, loads)
    for name in sources:
        given[name] = given.get(name, 0.0) + (first[name] + second[name]) * SHRINK
    return given


def _filled(room: float, caps: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """Share `room` in proportion to `weights`, none above its cap; the rest of a full one goes to the others.

    With equal weights that is max-min fairness.
    """
    given = dict.fromkeys(caps, 0.0)
    open_ = sorted(
        (name for name in caps if caps[name] > 0 and weights[name] > 0),
        key=lambda name: (caps[name] / weights[name], name),
    )
    weight = sum(weights[name] for name in open_)
    for name in open_:
        given[name] = max(0.0, min(caps[name], room * weights[name] / weight)) if weight > 0 else 0.0
        room -= given[name]
        weight -= weights[name]
    return given


def _apportioned(whole: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Split a whole number by the method of the largest remainder."""
    exact = {name: whole * weight for name, weight in weights.items()}
    parts = {name: int(value) for name, value in exact.items()}
    left = whole - sum(parts.values())
    order = sorted(exact, key=lambda name: (parts[name] - exact[name], name))
    for place in range(abs(left)):
        parts[order[place % len(order)]] += 1 if left > 0 else -1
    return parts
