"""Metrics about regions at a control process. A process that does not lead exports the values of a fresh one."""

from __future__ import annotations

import math
from functools import partial
from typing import Final

from controlplane.region_control import RegionControl
from controlplane.regions.declared import DeclaredState
from controlplane.regions.observed import State
from controlplane.regions.views import View
from kvmesh.clock import Clock
from kvmesh.metrics import Metrics
from kvmesh.regions.quantity import NOTHING, Quantity

GIVEN: Final = "given"
TAKEN: Final = "taken"
"""Directions of a grant, as the own region sees it."""


def export_regions(regions: RegionControl, metrics: Metrics, clock: Clock) -> None:
    """Export states, weights, spill, grants and the age of news, each by region."""
    read = _Reads(regions, clock)
    others = sorted(regions.regions.targets)
    for name in (regions.own, *others):
        for declared in DeclaredState:
            metrics.gauge(
                "region_declared",
                "1 for the state that a region declares.",
                partial(read.is_declared, name, declared),
                region=name,
                state=declared.name,
            )
        metrics.gauge(
            "region_drain_overdue",
            "1 while the drain of a region lasts longer than its operator expected.",
            partial(read.is_overdue, name),
            region=name,
        )
        metrics.gauge(
            "region_weight_percent",
            "Weight of a region for the own callers: the lower of its declared and observed states.",
            partial(read.weight_percent, name),
            region=name,
        )
    for name in others:
        for observed in State:
            metrics.gauge(
                "region_observed",
                "1 for the state in which the own region observes another one.",
                partial(read.is_observed, name, observed),
                region=name,
                state=observed.name,
            )
        metrics.gauge(
            "region_by_hand",
            "1 while an operator's order overrides the observed state of a region.",
            partial(read.is_by_hand, name),
            region=name,
        )
        metrics.gauge(
            "region_spill_share",
            "Share of the own callers that is spilled to a region.",
            partial(read.spill_share, name),
            region=name,
        )
        metrics.gauge(
            "region_heard_age_seconds",
            "Seconds since the last news of a region; +Inf before the first.",
            partial(read.heard_age_s, name),
            region=name,
        )
        for direction in (GIVEN, TAKEN):
            metrics.gauge(
                "region_grant_tokens_per_second",
                "Grant between the own region and another one, in uncached prompt tokens per second.",
                partial(read.grant_tokens_per_s, name, direction),
                region=name,
                direction=direction,
            )
            metrics.gauge(
                "region_grant_blocks",
                "Grant between the own region and another one, in KV blocks.",
                partial(read.grant_blocks, name, direction),
                region=name,
                direction=direction,
            )


class _Reads:
    """Values of one scrape."""

    def __init__(self, regions: RegionControl, clock: Clock) -> None:
        self._regions = regions
        self._clock = clock

    def is_declared(self, name: str, state: DeclaredState) -> float:
        return float(self._view(name).declared.state is state)

    def is_observed(self, name: str, state: State) -> float:
        return float(self._view(name).observed is state)

    def is_by_hand(self, name: str) -> float:
        return float(self._view(name).is_by_hand)

    def is_overdue(self, name: str) -> float:
        return float(self._regions.is_overdue(name))

    def weight_percent(self, name: str) -> float:
        return self._view(name).weight_percent

    def spill_share(self, name: str) -> float:
        return self._regions.regions.spill().get(name, 0.0)

    def heard_age_s(self, name: str) -> float:
        age_s = self._regions.heard_age_s(name, self._clock.now_s())
        return math.inf if age_s is None else age_s

    def grant_tokens_per_s(self, name: str, direction: str) -> float:
        return self._grant(name, direction).tokens_per_s

    def grant_blocks(self, name: str, direction: str) -> float:
        return self._grant(name, direction).blocks

    def _view(self, name: str) -> View:
        return self._regions.regions.states(self._clock.now_s())[name]

    def _grant(self, name: str, direction: str) -> Quantity:
        source, holder = (self._regions.own, name) if direction == GIVEN else (name, self._regions.own)
        return self._regions.grants_of(source).get(holder, NOTHING)
