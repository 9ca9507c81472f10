"""Every parameter of the states of regions, their grants and their spill. Pure.

Source of the values: the design of regions, sections 4 and 5; its thresholds follow Google Cloud's automatic capacity drain
and Envoy's panic threshold. No user sets them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Final, TypeVar

from kvmesh.regions.lease import LeaseSettings
from kvmesh.regions.spill import SpillSettings

Settings = TypeVar("Settings")

PER_S: Final = "_per_s"
S: Final = "_s"


@dataclass(frozen=True, slots=True)
class RegionSettings:
    """Parameters by the module that uses them. Times in seconds, shares and weights in parts of 1 or in percent."""

    # Signals.
    signals_every_s: float = 2.0
    window_s: float = 10.0
    """Time over which health is taken."""
    unheard_after_s: float = 6.0
    """Age at which the last signals of a region are unknown: three of them are lost."""
    attempts_min: int = 20
    """Fewest attempts in the window that have a success rate."""

    # Observed state. H is the health of the target in [0, 1].
    step_max_s: float = 3.0
    """Longest time between two steps of which the later one knows: a longer gap was a frozen process."""
    suspect_below: float = 0.7
    suspect_after_s: float = 10.0
    healthy_above: float = 0.85
    healthy_after_s: float = 30.0
    out_below: float = 0.5
    out_after_s: float = 20.0
    hard_down_after_s: float = 6.0
    """Time of failing probes after which a target is hard down."""
    probe_fresh_s: float = 3.0
    """Longest time between two results of a prober that works. An older failure is unknown."""
    out_min_s: float = 300.0
    """Shortest time in OUT. Doubled by each earlier entry within `flaps_s`."""
    out_max_s: float = 3600.0
    """Longest such time."""
    flaps_s: float = 3600.0
    recovered_after_s: float = 120.0
    """Time of health above `healthy_above` before a target leaves OUT."""
    seeding_max_s: float = 60.0
    """Time of attempted seeding after which a target leaves OUT unseeded."""
    stages_percent: tuple[float, ...] = (5.0, 15.0, 35.0, 70.0, 100.0)
    """Weights of RECOVERING."""
    stage_s: float = 30.0
    """Time at each of them."""
    cold_below_s: float = 60.0
    """Age below which all decode engines make a region cold, if those of another region are older by as much."""
    panic_below: float = 0.5
    """Share of healthy capacity below which no answering region is taken out for its health."""

    # Declared state.
    drain_percent: tuple[float, ...] = (60.0, 30.0, 0.0)
    """Weights of a drain."""
    drain_stage_s: float = 5.0
    """Time at each of them."""

    # Grants.
    grant_share: float = 0.8
    """Part of the capacity that own callers and guests may use together."""
    grant_lost_share: float = 1.0
    """The same while a region is lost: its callers have no other place, and own callers go before them."""
    grant_lost_after_s: float = 1.0
    """Time of failing probes from which a region counts as lost for grants: its callers come before its state changes."""
    grant_new_below: float = 0.7
    """Load, as a part of the capacity, from which a region grants nothing new."""

    spill: SpillSettings = field(default_factory=SpillSettings)
    lease: LeaseSettings = field(default_factory=LeaseSettings)

    def scaled(self, factor: float) -> RegionSettings:
        """Return the settings with every time multiplied by `factor`, and every rate divided by it: for tests."""
        return scaled(self, factor)


def scaled(settings: Settings, factor: float) -> Settings:
    """Return a dataclass of settings at another speed. A field's suffix tells times from rates."""
    changes: dict[str, Any] = {}
    for each in fields(settings):  # type: ignore[arg-type]  # a type variable cannot be bound to dataclasses
        value = getattr(settings, each.name)
        if is_dataclass(value):
            changes[each.name] = scaled(value, factor)
        elif each.name.endswith(PER_S):
            changes[each.name] = value / factor
        elif each.name.endswith(S):
            changes[each.name] = value * factor
    return replace(settings, **changes)  # type: ignore[type-var]  # as above
