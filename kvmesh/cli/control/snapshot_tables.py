"""Tables of snapshots and their receivers, and the difference of two snapshots. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp
from rich.table import Table
from rich.text import Text

from kvmesh.cli.control.durations import words
from kvmesh.cli.control.rollout_tables import TimeText
from kvmesh.cli.control.rollout_text import state_word, word_of
from kvmesh.cli.fitted_table import NONE, Column, FittedTable
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.control.v1 import snapshot_pb2 as snapshots

_HISTORY: Final = (
    Column("snapshot"),
    Column("published", rank=2),
    Column("by", rank=4),
    Column("weights", is_text=True),
    Column("rollout", rank=3),
    Column("reason", rank=1, is_text=True),
)
_RECEIVERS: Final = (
    Column("receiver"),
    Column("role", rank=3),
    Column("pool", rank=4),
    Column("snapshot"),
    Column("state"),
    Column("heard", rank=2),
    Column("live requests", rank=1),
    Column("last refusal", is_text=True, is_rare=True),
)


@dataclass(frozen=True, slots=True)
class DiffRow:
    """One part of two contents. A text of "-": absent."""

    part: str
    before: str
    after: str

    @property
    def is_changed(self) -> bool:
        """True if the contents differ in this part."""
        return self.before != self.after


def name_text(name: snapshots.SnapshotName) -> str:
    """Return a name as commands take it, for example "7.control-0/3"; "-" without one."""
    return f"{name.term.number}.{name.term.leader}/{name.version}" if name.version else NONE


def parts(content: snapshots.SnapshotContent) -> dict[str, str]:
    """Return each part of a content in words, by its name."""
    found = {f"pool {pool.pool}": _pool(pool) for pool in content.pools}
    if content.rollout:
        found["rollout"] = content.rollout
        found["rollout state"] = f"{state_word(content.rollout_state)}, step {content.step}"
    for title, tenants in (("only tenants", content.only_tenants), ("never tenants", content.never_tenants)):
        if tenants:
            found[title] = ", ".join(sorted(tenants))
    for cordon in content.cordons:
        boot = f", boot {cordon.boot_id}" if cordon.boot_id else ""
        reason = f": {cordon.reason}" if cordon.reason else ""
        found[f"replica {cordon.process_id}"] = (
            ("draining" if cordon.draining else "cordoned") + boot + reason
        )
    for shadow in content.shadows:
        found[f"shadow {shadow.shadow}"] = (
            f"{shadow.sample_permille / 10:g} % of sessions to {shadow.to_pool}"
        )
    if content.ended_rollouts:
        found["taken back"] = ", ".join(content.ended_rollouts)
    return found


def diff_rows(before: Mapping[str, str], after: Mapping[str, str]) -> list[DiffRow]:
    """Return all parts of two contents side by side, pools first, in the order of the contents."""
    names = dict.fromkeys([*before, *after])
    ordered = sorted(names, key=lambda name: not name.startswith("pool "))
    return [DiffRow(name, before.get(name, NONE), after.get(name, NONE)) for name in ordered]


def diff_table(before: pb.SnapshotView, after: pb.SnapshotView) -> Table:
    """Return two snapshots side by side. Changed parts are marked with "*"."""
    table = Table("")
    table.add_column("part", no_wrap=True)
    for view in (before, after):
        table.add_column(name_text(view.name), overflow="fold")
    for row in diff_rows(parts(before.content), parts(after.content)):
        style = "bold" if row.is_changed else "dim"
        mark = "*" if row.is_changed else ""
        table.add_row(mark, Text(row.part), Text(row.before), Text(row.after), style=style)
    return table


def snapshot_table(view: pb.SnapshotView, time_text: TimeText) -> Table:
    """Return one snapshot with all its parts."""
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("snapshot", Text(name_text(view.name)))
    table.add_row("published", _published(view, time_text))
    table.add_row("by", Text(view.by or "the control plane"))
    table.add_row("reason", Text(view.reason or NONE))
    for name, value in parts(view.content).items():
        table.add_row(Text(name), Text(value))
    return table


def history_table(views: Sequence[pb.SnapshotView], time_text: TimeText) -> FittedTable:
    """Return one row per snapshot, the latest first."""
    table = FittedTable(_HISTORY)
    for view in views:
        weights = ", ".join(
            f"{pool.pool} {pool.weight_percent} %" for pool in view.content.pools if pool.weight_percent
        )
        cells = (view.by or "control plane", weights, view.content.rollout or NONE, view.reason or NONE)
        table.add_row(name_text(view.name), _published(view, time_text), *cells)
    return table


def receivers_table(receivers: Sequence[pb.ReceiverView]) -> FittedTable:
    """Return one row per receiver."""
    table = FittedTable(_RECEIVERS)
    for each in receivers:
        state = Text("current", style="green") if each.is_current else Text("behind", style="yellow")
        live = f"{each.live_request_count:,}" if each.HasField("live_request_count") else NONE
        cells = (each.process_id, each.role, each.pool or NONE, name_text(each.applied))
        heard = f"{words(each.silent_s)} ago"
        table.add_row(*cells, state, heard, live, Text(each.rejection or NONE, style="red"))
    return table


def _published(view: pb.SnapshotView, time_text: TimeText) -> str:
    return time_text(Timestamp(seconds=view.content.published_ms // 1000))


def _pool(pool: snapshots.PoolTrack) -> str:
    track = word_of(snapshots.Track, pool.track, "TRACK_").lower()
    role = "idle" if track == "unspecified" else track
    closed = ", closed" if pool.closed else ""
    return f"{role} {pool.weight_percent} %, version {pool.model_version}{closed}"
