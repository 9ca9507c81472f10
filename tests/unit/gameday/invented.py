"""Invented runs of a game day: bins and views by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tests.gameday.bins import BIN_S, Bin
from tests.gameday.calls import GOOD
from tests.gameday.records import Capacity, Record, Times
from tests.gameday.shapes import KINDS
from tests.gameday.views import HEALTHY, View

REGIONS = ("eu", "us")
TIMES = Times(steady_s=-20.0, struck_s=1.0, heal_s=75.0, healed_s=85.0, ended_s=115.0)
PER_BIN = 20
TTFT_MS = 100


def quiet_bins(**changes: Any) -> list[Bin]:
    """Return bins in which every caller is served at home, once a second; `changes` to all of them."""
    return [
        quiet_bin(at, home, kind, **changes)
        for at in range(round(TIMES.steady_s / BIN_S), round(TIMES.ended_s / BIN_S), round(1 / BIN_S))
        for home in REGIONS
        for kind in KINDS
    ]


def quiet_bin(at: int, home: str, kind: str, **changes: Any) -> Bin:
    """Return a bin in which everything is well."""
    served = {home: PER_BIN}
    made = Bin(
        at=at,
        home=home,
        kind=kind,
        outcomes={GOOD: PER_BIN},
        attempts=PER_BIN,
        ttfts_ms=(TTFT_MS,) * PER_BIN,
        fronts=served,
        served=served,
        tried=served,
        uncached={home: 20 * PER_BIN},
    )
    return msgspec.structs.replace(made, **changes)


def changed(
    bins: list[Bin], from_s: float, to_s: float, home: str = "", kind: str = "", **changes: Any
) -> list[Bin]:
    """Return the bins with changes to those of a time, and of a home and a kind if given."""
    return [
        msgspec.structs.replace(each, **changes)
        if from_s <= each.at * BIN_S < to_s and home in ("", each.home) and kind in ("", each.kind)
        else each
        for each in bins
    ]


def view(at_s: float, by: str, region: str, **changes: Any) -> View:
    """Return a row in which everything is well."""
    made = View(at_s=at_s, by=by, region=region, observed="" if by == region else HEALTHY, weight=1.0)
    return msgspec.structs.replace(made, **changes)


def views(**grants: Mapping[str, float]) -> list[View]:
    """Return a row per second and pair. `grants`: what each region gives."""
    return [
        view(float(at_s), by, region, grants=grants.get(region, {}))
        for at_s in range(100)
        for by in REGIONS
        for region in REGIONS
    ]


def record(bins: list[Bin] | None = None, seen: list[View] | None = None, **changes: Any) -> Record:
    """Return a run; without bins every caller is served well at home."""
    made = Record(
        event="kill",
        load="plan",
        regions=REGIONS,
        number=1,
        commit="abc",
        cpu="a machine",
        began="2026-01-01T00:00:00+00:00",
        took_s=200.0,
        capacity=Capacity(requests_per_s=10.0, tokens_per_s=1000.0, hit_ratio=0.8),
        utilisation=0.4,
        capacities={"eu": 1000.0, "us": 1000.0},
        times=TIMES,
        bins=tuple(quiet_bins() if bins is None else bins),
        views=tuple(views() if seen is None else seen),
        busy=0.5,
        late_s=0.01,
    )
    return msgspec.structs.replace(made, **changes)
