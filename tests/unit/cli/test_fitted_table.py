"""Tables on narrow terminals: names stay whole, and columns that do not fit are named."""

from __future__ import annotations

import io
import re

from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvmesh.cli import replicas
from kvmesh.cli.control import audit, rollout_tables, snapshot_tables
from kvmesh.cli.fitted_table import WIDE_COLUMNS, Column, FittedTable, output_console
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.membership.member import Member
from tests.unit.cli.control.messages import receiver, rollout, text_of, view

NAMES = st.lists(st.text("abcdefgh-0123", min_size=1, max_size=24), min_size=1, max_size=5, unique=True)
NAME = "stable-young-prefill-0"
TERMINAL = 80


def at(time: Timestamp) -> str:
    """Return a time as tables show it."""
    return f"{time.ToDatetime():%Y-%m-%d %H:%M:%S}"


@given(NAMES, st.integers(60, 300), st.text("ab ", max_size=90))
def test_a_name_is_never_broken(names: list[str], width: int, sentence: str) -> None:
    """At each width every name is whole in one line, no line is too long, and columns left out are named."""
    columns = [Column("name"), Column("place", rank=1), Column("kind", rank=2), Column("why", is_text=True)]
    table = FittedTable(columns)
    for name in names:
        table.add_row(name, f"at-{name}-{name}", f"kind-of-{name}", sentence)
    lines = text_of(table, width=width).splitlines()
    for name in names:
        assert any(f"│ {name} " in line for line in lines)
    assert max(map(len, lines)) <= width
    head = lines[1]
    for column in columns:
        assert column.name in head or column.name in lines[-1]


@given(NAMES, st.integers(40, 300), st.text("ab ", max_size=90))
def test_a_listed_row_keeps_all_columns(names: list[str], width: int, sentence: str) -> None:
    """At each width every cell is whole, beside or below the name of its column, and no line is too long."""
    columns = [Column("name"), Column("place"), Column("why", is_text=True), Column("rare", is_rare=True)]
    table = FittedTable(columns, is_listed=True)
    for name in names:
        table.add_row(name, f"at-{name}", sentence, "-")
    shown = text_of(table, width=width)
    assert max(map(len, shown.splitlines())) <= width
    assert "Left out" not in shown and "rare" not in shown and "…" not in shown
    words = re.split(r"[\s,│]+", shown)
    for name in names:
        assert name in words and f"at-{name}" in words
    assert set(sentence.split()) <= set(words) or max(map(len, sentence.split())) > 30


def test_the_highest_rank_is_left_out_first_and_a_rare_column_without_values_always() -> None:
    """A column of rank 0 stays at any width."""
    table = FittedTable(
        [Column("a"), Column("b", rank=1), Column("c", rank=2), Column("d", is_rare=True)], "ask c"
    )
    table.add_row("x" * 20, "y" * 20, "z" * 20, "-")
    assert "Left out" not in text_of(table, width=100)
    assert " d " not in text_of(table, width=100)
    assert "Left out at 50 columns: c; ask c." in text_of(table, width=50)
    assert "Left out at 40 columns: b, c; ask c." in text_of(table, width=40)
    assert "x" * 20 in text_of(table, width=24)


def test_the_tables_of_a_mesh_of_three_pools_fit_a_terminal() -> None:
    """Names of processes, snapshots, states and gates are whole at 80 columns."""
    long_name = "12.control-0/104"
    leases = replicas.rows_of(
        [
            Member(
                process_id=NAME,
                role="prefill",
                address="127.0.0.1:45001",
                boot_id="b0",
                block_tokens=16,
                pool="stable-young",
                model_version="v1",
                state="serving",
                snapshot=long_name,
            )
        ]
    )
    verdict = pb.Verdict(
        gates=[
            pb.Gate(name="computed_share", figure=0.001, bound=1.1, p=0.5, alpha=5e-4, result="needs more")
        ]
    )
    verdict.gates[0].reason = "12 canary and 13 comparison sessions have a TTFT; at least 20 each are needed"
    taken = receiver(NAME, version=104, role="prefill", pool="stable-young", live=3, silent_s=0.4)
    entry = audit.AuditEvent("1795428902000-0", "snapshot.published", long_name, "done", "", "", "control-0")
    shown = {
        "replicas": text_of(replicas._list_table(leases), width=TERMINAL),
        "receivers": text_of(snapshot_tables.receivers_table([taken]), width=TERMINAL),
        "snapshots": text_of(snapshot_tables.history_table([view(104)], at), width=TERMINAL),
        "gates": text_of(rollout_tables.gates_table(verdict), width=TERMINAL),
        "rollouts": text_of(rollout_tables.history_table([rollout()], at), width=TERMINAL),
        "events": text_of(audit.table([entry], at), width=TERMINAL),
    }
    whole = {
        "replicas": (NAME, "prefill", "serving"),
        "receivers": (NAME, "7.control-0/104", "behind"),
        "snapshots": ("7.control-0/104", "stable 90 %"),
        "gates": ("computed_share", "0.001", "1.1", "needs more"),
        "rollouts": ("r-1", "BAKING"),
        "events": ("2026-11-23 10:15:02", "snapshot.published"),
    }
    for table, words in whole.items():
        for word in words:
            assert word in shown[table], shown[table]
        assert max(map(len, shown[table].splitlines())) <= TERMINAL


def test_a_pipe_gets_all_columns() -> None:
    """A program that filters lines needs every column."""
    assert output_console().width >= WIDE_COLUMNS
    assert not Console(file=io.StringIO()).is_terminal
