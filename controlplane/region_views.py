"""Regions as operators see them: rows of `kvmesh region list` and of a drain's forecast. Pure."""

from __future__ import annotations

from typing import Final

from google.protobuf.duration_pb2 import Duration

from controlplane.region_control import RegionControl
from controlplane.regions import grants as granting
from controlplane.regions.declared import DeclaredState
from controlplane.regions.forecast import Forecast
from controlplane.regions.news import declared_message, quantity_message, signals_message
from controlplane.regions.views import View
from kvmesh.control.v1 import region_pb2 as pb
from kvmesh.regions.quantity import NOTHING

BUSY_MAX: Final = 8
"""Most processes that are named beside a drain that waits for them."""


def views(regions: RegionControl, now_s: float) -> list[pb.RegionView]:
    """Return the own region, then the others by name."""
    states = regions.regions.states(now_s)
    return [
        _view(regions, states[name], now_s)
        for name in sorted(states, key=lambda each: (each != regions.own, each))
    ]


def _view(regions: RegionControl, state: View, now_s: float) -> pb.RegionView:
    name, is_own = state.name, state.name == regions.own
    signals, entry = regions.signals(name), regions.entry(name)
    known = regions.regions.known(name)
    since_s = known.since_s if known is not None else now_s
    room = (
        granting.headroom(signals.capacity, signals.full_load, regions.settings.grant_share)
        if signals is not None
        else NOTHING
    )
    is_initial = state.since_s <= 0.0
    is_draining = is_own and state.declared.state is DeclaredState.DRAINING
    message = pb.RegionView(
        region=name,
        is_own=is_own,
        declared=declared_message(name, state.declared, max(0.0, now_s - since_s)),
        observed=pb.OBSERVED_STATE_UNSPECIFIED
        if is_own
        else pb.ObservedState.Value(f"OBSERVED_STATE_{state.observed.value}"),
        weight=state.weight_percent / 100,
        reason="" if is_initial and not is_own else state.reason,
        is_by_hand=state.is_by_hand,
        health=state.health,
        is_stale=regions.is_stale(name, now_s),
        signals=None if signals is None else signals_message(signals),
        headroom=quantity_message(room),
        grants=[
            pb.Grant(region=source, quantity=quantity_message(grant))
            for source, grant in sorted(regions.grants_of(name).items())
        ],
        spill_share=regions.regions.spill().get(name, 0.0),
        limit_share=regions.regions.limit_share(now_s) if is_own else regions.regions.shares(now_s)[name],
        stable_version=regions.stable[1] if is_own else entry.stable_version,
        tenants_differ=entry.tenants_differ,
        unaware_count=regions.unaware_count if is_own else 0,
        busy=[
            pb.BusyProcess(process=process, request_count=count)
            for process, count in list((regions.busy or {}).items() if is_draining else ())[:BUSY_MAX]
        ],
    )
    if not is_initial and now_s - state.since_s < _AGE_MAX_S:
        message.age.CopyFrom(_duration(now_s - state.since_s))
    if state.is_by_hand:
        message.by_hand_left.CopyFrom(_duration(max(0.0, state.by_hand_until_s - now_s)))
    heard_age_s = regions.heard_age_s(name, now_s)
    if heard_age_s is not None:
        message.heard_age.CopyFrom(_duration(heard_age_s))
    return message


def forecast_rows(regions: RegionControl, found: Forecast | None) -> list[pb.DrainForecast]:
    """Return a row for each survivor of a drain. The moved load is split by headroom."""
    if found is None:
        return []
    whole = found.headroom.tokens_per_s
    rows = []
    for name, room in sorted(found.headrooms.items()):
        signals = regions.signals(name)
        part = room.tokens_per_s / whole if whole > 0 else 1 / len(found.headrooms)
        rows.append(
            pb.DrainForecast(
                region=name,
                load=quantity_message(signals.full_load if signals is not None else NOTHING),
                moved=quantity_message(found.moved * part),
                capacity=quantity_message(signals.capacity if signals is not None else NOTHING),
                is_enough=(found.at_home * part).fits(room),
                is_enough_at_once=(found.moved * part).fits(room),
            )
        )
    return rows


_AGE_MAX_S = 1e9
"""Longest age that is shown: a state from before the start of this process has none."""


def _duration(time_s: float) -> Duration:
    found = Duration()
    found.FromMilliseconds(round(max(0.0, time_s) * 1000))
    return found
