"""Regions in words and tables: states, load, grants, spill, the forecast of a drain. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Group, RenderableType
from rich.text import Text

from kvmesh.cli.control import durations
from kvmesh.cli.control.rollout_text import word_of
from kvmesh.cli.fitted_table import NONE, Column, FittedTable
from kvmesh.control.v1 import region_pb2 as pb

UNKNOWN: Final = "unknown"
BY_HAND: Final = "by hand"
STALE: Final = "stale"
OWN: Final = "(own)"

_REGIONS: Final = (
    Column("region"),
    Column("declares"),
    Column("observed"),
    Column("weight", justify="right"),
    Column("healthy", rank=3, justify="right"),
    Column("load", rank=1, justify="right"),
    Column("headroom", rank=2, justify="right"),
    Column("grants", rank=4),
    Column("spilled there", rank=5, justify="right", is_rare=True),
    Column("limits", rank=7, justify="right"),
    Column("version", rank=6),
)
_FORECAST: Final = (
    Column("region"),
    Column("load", rank=1, justify="right"),
    Column("moves there", justify="right"),
    Column("capacity", justify="right"),
    Column("carries it"),
)
DRAINS: Final = (pb.DECLARED_STATE_DRAINING, pb.DECLARED_STATE_DRAINED)
"""States of a region that is drained, or on its way there."""

_STATES: Final = {
    "SERVING": "green",
    "HEALTHY": "green",
    "DRAINING": "yellow",
    "SUSPECT": "yellow",
    "RECOVERING": "yellow",
    "DRAINED": "red",
    "OUT": "red",
}


TimeText = Callable[[Timestamp], str]


def screen(
    regions: Sequence[pb.RegionView], time_text: TimeText, now_s: float, note: str = ""
) -> RenderableType:
    """Return the table of all regions, and a line for each fact that needs words.

    `now_s`: Unix time of the answer. `note`: the last line.
    """
    versions = {each.stable_version for each in regions if each.stable_version}
    table = FittedTable(_REGIONS)
    for each in regions:
        table.add_row(*_cells(each, has_versions=len(versions) > 1))
    own = next((each.region for each in regions if each.is_own), UNKNOWN)
    lines = [Text(line) for line in notes(regions, time_text, now_s)]
    unit = f"As {own} sees them. Load, headroom, grants: uncached prompt tokens/s (tok/s), KV blocks (bl)."
    return Group(table, *lines, Text(unit, style="dim"), *([Text(note, style="yellow")] if note else []))


def notes(regions: Sequence[pb.RegionView], time_text: TimeText, now_s: float) -> list[str]:
    """Return why and since when each region is in its state, and what differs between regions. `now_s`: Unix time."""
    lines: list[str] = []
    for each in regions:
        declared = _declared_note(each, time_text, now_s)
        lines += filter(None, (declared, _busy_note(each), _observed_note(each), _stale_note(each)))
        if each.tenants_differ:
            lines.append(f"{each.region}: its tenants differ in residency, limits or disabled marks.")
        if each.unaware_count:
            processes = "1 process" if each.unaware_count == 1 else f"{each.unaware_count} processes"
            lines.append(f"{each.region}: {processes} of a release without regions, at home alone.")
    if regions and all(each.weight <= 0 for each in regions):
        lines.append("No region has a weight: drained ones serve their own callers all the same.")
    versions = {each.region: each.stable_version for each in regions if each.stable_version}
    if len(set(versions.values())) > 1:
        shown = ", ".join(f"{version} in {region}" for region, version in versions.items())
        lines.append(f"Stable model versions differ: {shown}.")
    return lines


def plain_line(regions: Iterable[pb.RegionView]) -> str:
    """Return the states in one line, for a pipe."""
    return "; ".join(
        f"{each.region} declares {declared_word(each)}"
        + ("" if each.is_own else f", is observed {observed_word(each)}")
        + f", weight {_percent(each.weight)}"
        for each in regions
    )


def forecast_table(rows: Iterable[pb.DrainForecast]) -> FittedTable:
    """Return one row for each region that stays."""
    table = FittedTable(_FORECAST)
    for each in rows:
        table.add_row(
            each.region,
            quantity(each.load),
            quantity(each.moved),
            quantity(each.capacity) if _is_known(each.capacity) else UNKNOWN,
            _carried(each),
        )
    return table


def _carried(row: pb.DrainForecast) -> Text:
    """Return if a survivor carries the load: at once, or not before its caches know the conversations."""
    if not row.is_enough:
        return Text("no", style="red")
    return Text("yes", style="green") if row.is_enough_at_once else Text("once warm", style="yellow")


def ending_text(region: str, count: int) -> str:
    """Return the sentence about streams that no other region can continue; empty if there are none."""
    if not count:
        return ""
    streams = "1 open stream of" if count == 1 else f"{count} open streams of"
    end = "ends" if count == 1 else "end"
    return f"{streams} {region} {end} if a frontend stops: no other region serves the model version (STALE_SNAPSHOT)."


def declared_word(region: pb.RegionView) -> str:
    """Return the declared state. A region that has declared nothing serves."""
    word = word_of(pb.DeclaredState, region.declared.state, "DECLARED_STATE_")
    return "SERVING" if region.declared.state == pb.DECLARED_STATE_UNSPECIFIED else word


def observed_word(region: pb.RegionView) -> str:
    """Return the observed state, marked where an operator set it or where no news arrive."""
    if region.is_own:
        return NONE
    if region.observed == pb.OBSERVED_STATE_UNSPECIFIED:
        return UNKNOWN
    marks = [BY_HAND] * region.is_by_hand + [STALE] * region.is_stale
    return " ".join((word_of(pb.ObservedState, region.observed, "OBSERVED_STATE_"), ", ".join(marks))).strip()


def quantity(amount: pb.Quantity) -> str:
    """Return an amount in both units."""
    return f"{amount.tokens_per_s:,.0f} tok/s, {amount.blocks:,.0f} bl"


def _cells(region: pb.RegionView, *, has_versions: bool) -> tuple[str | Text, ...]:
    signals = region.signals
    is_measured = region.HasField("signals") and _is_known(signals.capacity)
    load = pb.Quantity(
        tokens_per_s=signals.load.tokens_per_s + sum(each.load.tokens_per_s for each in signals.guests),
        blocks=signals.load.blocks + sum(each.load.blocks for each in signals.guests),
    )
    grants = [
        f"to {each.region}: {quantity(each.quantity)}" for each in region.grants if _is_some(each.quantity)
    ]
    version = region.stable_version or UNKNOWN
    return (
        f"{region.region} {OWN}" if region.is_own else region.region,
        _coloured(declared_word(region)),
        _coloured(observed_word(region)),
        _percent(region.weight),
        _percent(region.health) if region.HasField("health") else UNKNOWN,
        quantity(load) if region.HasField("signals") else UNKNOWN,
        quantity(region.headroom) if is_measured else UNKNOWN,
        "\n".join(grants) or NONE,
        _percent(region.spill_share) if region.spill_share else NONE,
        _percent(region.limit_share),
        f"{version} (differs)" if has_versions and not region.is_own else version,
    )


def _declared_note(region: pb.RegionView, time_text: TimeText, now_s: float) -> str:
    declared = region.declared
    if declared.state not in DRAINS:
        return ""
    by = f" by {declared.author}" if declared.author else ""
    until = f"; expected to end {time_text(_time(declared.until_ms))}" if declared.until_ms else ""
    if until and declared.until_ms <= 1000 * now_s:
        until += ", which has passed"
    word = declared_word(region)
    return f"{region.region}: {word} since {time_text(_time(declared.declared_ms))}{by}: {declared.reason}{until}."


def _busy_note(region: pb.RegionView) -> str:
    if not region.busy or region.weight > 0:
        return ""
    found = [
        f"{each.process} ({f'{each.request_count:,} open' if each.HasField('request_count') else 'no report'})"
        for each in region.busy
    ]
    return f"{region.region}: DRAINED follows once these have no request: {', '.join(found)}."


def _observed_note(region: pb.RegionView) -> str:
    if region.is_own or region.observed == pb.OBSERVED_STATE_UNSPECIFIED or not region.reason:
        return ""
    if region.reason == region.declared.reason and region.declared.state in DRAINS:
        return ""
    age = f" for {durations.words(durations.seconds_of(region.age))}" if region.HasField("age") else ""
    if region.HasField("by_hand_left"):
        left = durations.words(durations.seconds_of(region.by_hand_left))
        word = word_of(pb.ObservedState, region.observed, "OBSERVED_STATE_")
        return f"{region.region}: {word}{age} {region.reason}; the order ends in {left}."
    return f"{region.region}: {observed_word(region)}{age}: {region.reason}."


def _stale_note(region: pb.RegionView) -> str:
    if not region.is_stale:
        return ""
    if not region.HasField("heard_age"):
        return f"{region.region}: not heard yet; its entry is that of the last snapshot."
    age = durations.words(durations.seconds_of(region.heard_age))
    return f"{region.region}: not heard for {age}; its entry is the last one that arrived."


def _coloured(word: str) -> Text:
    return Text(word, style=_STATES.get(word.partition(" ")[0], ""))


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _is_known(capacity: pb.Quantity) -> bool:
    return capacity.tokens_per_s > 0


def _is_some(amount: pb.Quantity) -> bool:
    return amount.tokens_per_s > 0 or amount.blocks > 0


def _time(at_ms: int) -> Timestamp:
    return Timestamp(seconds=at_ms // 1000)
