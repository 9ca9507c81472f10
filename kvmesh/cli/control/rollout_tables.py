"""Tables of rollouts for the terminal: `rollout status`, its live screen, and `rollout history`. Pure.

`time_text` writes a time. It is an argument, because the time zone is the terminal's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvmesh.cli.control import rollout_text as text
from kvmesh.cli.fitted_table import Column, FittedTable
from kvmesh.control.v1 import control_pb2 as pb

TimeText: TypeAlias = Callable[[Timestamp], str]

CHANGES_SHOWN: Final = 8
"""Changes on the screen of a running rollout, the latest. `rollout history` shows all."""

_SAMPLES: Final = (
    Column("samples"),
    Column("sessions", justify="right"),
    Column("requests", justify="right"),
    Column("errors", justify="right"),
    Column("client errors", rank=2, justify="right"),
    Column("open", justify="right"),
    Column("output tokens, mean", rank=3, justify="right"),
    Column("finish reasons", rank=4),
)
_GATES: Final = (
    Column("gate"),
    Column("figure", justify="right"),
    Column("bound", justify="right"),
    Column("samples", rank=3, justify="right"),
    Column("p", rank=1, justify="right"),
    Column("fails below", rank=2, justify="right"),
    Column("result"),
    Column("reason", is_text=True, is_rare=True),
)
_HISTORY: Final = (
    Column("rollout"),
    Column("started", rank=2),
    Column("by", rank=4),
    Column("pools", rank=3),
    Column("state"),
    Column("step", rank=1),
    Column("reason", is_text=True),
)
_STEP_STYLES: Final = {"done": "green", "present": "bold reverse", "ahead": "dim"}
_RESULT_STYLES: Final = {
    "passes": "green",
    "fails": "bold red",
    "needs more": "yellow",
    "inconclusive": "yellow",
    "reported": "dim",
}
_KIND_STYLES: Final = {
    pb.Verdict.KIND_PASS: "green",
    pb.Verdict.KIND_FAIL: "bold red",
    pb.Verdict.KIND_NEEDS_MORE: "yellow",
    pb.Verdict.KIND_INCONCLUSIVE: "yellow",
}


def status_screen(rollout: pb.Rollout, time_text: TimeText, note: str = "") -> RenderableType:
    """Return the whole state of one rollout. `note`: a last line, for example about a lost connection."""
    parts: list[RenderableType] = [_facts(rollout)]
    if rollout.verdict.samples:
        parts.append(samples_table(rollout.verdict))
    if rollout.verdict.gates:
        parts.append(gates_table(rollout.verdict))
    parts.append(changes_table(rollout.changes[-CHANGES_SHOWN:], time_text))
    if note:
        parts.append(Text(note, style="yellow"))
    return Group(*parts)


def samples_table(verdict: pb.Verdict) -> FittedTable:
    """Return the samples of each track."""
    table = FittedTable(_SAMPLES)
    for track, name in text.TRACKS:
        for found in verdict.samples:
            if found.track == track:
                counts = (found.sessions, found.requests, found.errors, found.client_errors, found.open)
                table.add_row(name, *(f"{count:,}" for count in counts), *text.reported_texts(found))
    return table


def gates_table(verdict: pb.Verdict) -> FittedTable:
    """Return each gate with its figure and its bound."""
    table = FittedTable(_GATES)
    for gate in verdict.gates:
        result = Text(gate.result or "-", style=_RESULT_STYLES.get(gate.result, ""))
        counts = text.samples_text(gate)
        figures = (text.figure_text(gate), text.bound_text(gate), counts, *text.chance_texts(gate))
        table.add_row(gate.name, *figures, result, gate.reason)
    return table


def changes_table(changes: Sequence[pb.RolloutChange], time_text: TimeText) -> Table:
    """Return the changes of state, the oldest first."""
    table = Table()
    table.add_column("at", no_wrap=True)
    table.add_column("change", overflow="fold")
    for change in changes:
        table.add_row(time_text(change.at), Text(text.change_text(change)))
    return table


def history_table(rollouts: Sequence[pb.Rollout], time_text: TimeText) -> FittedTable:
    """Return one row per rollout, the latest first."""
    table = FittedTable(_HISTORY, "`kvmesh rollout history ROLLOUT` and --json have them")
    for each in rollouts:
        step = f"{each.step} of {len(each.settings.steps_percent)}" if each.step else "-"
        words = (
            each.started_by or "-",
            text.pools_text(each),
            text.state_word(each.state),
            step,
            each.reason or "-",
        )
        table.add_row(each.rollout, time_text(each.started_at), *words)
    return table


def report(rollout: pb.Rollout, time_text: TimeText) -> RenderableType:
    """Return the report of one rollout: each change with every number that decided it."""
    parts: list[RenderableType] = [_facts(rollout)]
    for change in rollout.changes:
        parts.append(Text(f"\n{time_text(change.at)}  {text.change_text(change)}", style="bold"))
        if change.HasField("verdict"):
            parts.append(_verdict_text(change.verdict))
            parts += [samples_table(change.verdict)] if change.verdict.samples else []
            parts += [gates_table(change.verdict)] if change.verdict.gates else []
    return Group(*parts)


def _facts(rollout: pb.Rollout) -> Table:
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("rollout", Text(f"{rollout.rollout}, {text.pools_text(rollout)}"))
    table.add_row("state", Text(f"{text.state_word(rollout.state)}: {rollout.reason or '-'}"))
    table.add_row("steps", _steps(rollout))
    table.add_row("weight", Text(text.weight_text(rollout).removeprefix("weight ")))
    if rollout.step and not text.is_over(rollout):
        table.add_row("baked", Text(text.baked_text(rollout)))
    table.add_row("compared with", Text(text.comparison_text(rollout)))
    if rollout.HasField("verdict"):
        table.add_row("verdict", _verdict_text(rollout.verdict))
        table.add_row("looks", Text(text.looks_text(rollout.verdict)))
    if rollout.settings.requirements:
        table.add_row("requirements", Text("\n".join(text.requirement_lines(rollout))))
    if rollout.waits_for and not text.is_over(rollout):
        table.add_row("waits for", Text("\n".join(rollout.waits_for), style="yellow"))
    if rollout.silent_frontends:
        names = ", ".join(rollout.silent_frontends)
        table.add_row("silent frontends", Text(f"{names}: their traffic is not under control", style="red"))
    return table


def _steps(rollout: pb.Rollout) -> Text:
    line = Text()
    for step, mark in text.step_words(rollout):
        line.append(step, style=_STEP_STYLES[mark])
        line.append("  ")
    line.rstrip()
    return line


def _verdict_text(verdict: pb.Verdict) -> Text:
    word = text.verdict_word(verdict.kind)
    return Text.assemble(
        (word, _KIND_STYLES.get(verdict.kind, "")), f": {verdict.reason}" if verdict.reason else ""
    )
