"""Shares of the own callers that a region sends to other regions. Pure.

The wanted share is 1 - U_max x capacity / load: the load above U_max of the capacity that is left. That is Envoy's
overprovisioning factor 1 / U_max, counted in tokens. A declared drain wants the share that its weight leaves over.

INVARIANT: the load that a share moves, counted without cache hits, is at most the target's grant times its weight.
INVARIANT: the shares rise by at most `rise_per_s`. They fall by at most `fall_per_s`, except below a smaller grant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from kvmesh.regions.quantity import NOTHING, Quantity


@dataclass(frozen=True, slots=True)
class SpillSettings:
    """Threshold and ramps of spill. Shares are parts of 1."""

    utilisation_max: float = 0.8
    """U_max: part of the own capacity that own callers may use before they spill."""
    rise_per_s: float = 0.20
    """Fastest rise of the sum of the shares."""
    fall_per_s: float = 0.02
    """Fastest voluntary fall of that sum: sessions come home slowly."""
    step_max_s: float = 2.0
    """Longest time that one step counts: a frozen process does not make up for its ramps."""


class Demand(msgspec.Struct, frozen=True):
    """Load of the own callers, at home and elsewhere, and the capacity at home."""

    load: Quantity
    """Load as it is at home, with cache hits."""
    cold_load: Quantity
    """The same load in a region without its prefixes: every prompt token counts."""
    capacity: Quantity
    """Capacity of the replicas that serve."""
    home_percent: float = 100.0
    """Weight that the region declares for itself, in [0, 100]."""


class SpillTarget(msgspec.Struct, frozen=True):
    """Another region as a target of spill."""

    region: str
    weight_percent: float
    """The lower of its declared and observed weights, in [0, 100]."""
    grant: Quantity
    """Its decayed grant to the own region."""
    takes_new: bool = True
    """False: the region keeps its share, and the share does not grow."""


class Spill(msgspec.Struct, frozen=True):
    """Shares of the own callers by target region, and the time of the step that made them."""

    shares: Mapping[str, float] = {}
    stepped_s: float | None = None

    @property
    def total(self) -> float:
        """Sum of the shares, at most 1."""
        return sum(self.shares.values())


def wanted_share(demand: Demand, settings: SpillSettings) -> float:
    """Return the share of the own callers that should be served elsewhere, whatever the grants are."""
    used = demand.load.share_of(demand.capacity)
    over = 1.0 - settings.utilisation_max / used if used > settings.utilisation_max else 0.0
    return min(1.0, max(over, 1.0 - demand.home_percent / 100.0))


def wanted_load(demand: Demand, settings: SpillSettings) -> Quantity:
    """Return the load that the wanted share puts on other regions: what the region asks grants for."""
    return demand.cold_load * wanted_share(demand, settings)


def limit_of(target: SpillTarget, cold_load: Quantity) -> float:
    """Return the largest share that the target's grant covers at its weight. A grant of nothing covers nothing."""
    if target.grant.is_zero or target.weight_percent <= 0:
        return 0.0
    return (target.grant * (target.weight_percent / 100.0)).cover_of(cold_load)


def step(
    spill: Spill, demand: Demand, targets: Iterable[SpillTarget], now_s: float, settings: SpillSettings
) -> Spill:
    """Return the shares at `now_s`. Each keeps what it has as far as its limit allows; only the difference moves."""
    elapsed_s = 0.0 if spill.stepped_s is None else now_s - spill.stepped_s
    elapsed_s = min(max(elapsed_s, 0.0), settings.step_max_s)
    limits: dict[str, float] = {}
    rooms: dict[str, float] = {}
    kept: dict[str, float] = {}
    for target in targets:
        limit = limits[target.region] = limit_of(target, demand.cold_load)
        kept[target.region] = min(spill.shares.get(target.region, 0.0), limit)
        rooms[target.region] = limit - kept[target.region] if target.takes_new else 0.0
    before, held = spill.total, sum(kept.values())
    goal = max(wanted_share(demand, settings), min(held, before - settings.fall_per_s * elapsed_s))
    goal = min(goal, before + settings.rise_per_s * elapsed_s, 1.0)
    shares = _shrunk(kept, held, goal) if goal < held else _grown(kept, rooms, goal - held)
    return Spill({region: share for region, share in shares.items() if share > 0.0}, now_s)


def spilled(spill: Spill, cold_load: Quantity, region: str) -> Quantity:
    """Return the load that the shares put on `region`."""
    share = spill.shares.get(region, 0.0)
    return cold_load * share if share else NOTHING


def _shrunk(kept: Mapping[str, float], held: float, goal: float) -> dict[str, float]:
    return {region: share * (goal / held) for region, share in kept.items()}


def _grown(kept: Mapping[str, float], rooms: Mapping[str, float], growth: float) -> dict[str, float]:
    room = sum(rooms.values())
    part = min(1.0, growth / room) if room > 0 else 0.0
    return {region: share + rooms[region] * part for region, share in kept.items()}
