"""Tables of snapshots and receivers, and the difference of two snapshots."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.cli.control import snapshot_tables as tables
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.control.v1 import snapshot_pb2 as snapshots
from tests.unit.cli.control.messages import name, receiver, rows_of, text_of, view

TEXTS = st.dictionaries(
    st.sampled_from(["pool a", "pool b", "rollout", "replica x", "taken back"]), st.text()
)


def at(time: Timestamp) -> str:
    """Return a time as its seconds."""
    return str(time.seconds)


def full(version: int = 3) -> pb.SnapshotView:
    """Return a snapshot with all its parts."""
    found = view(version=version)
    content = found.content
    content.rollout_state, content.step = snapshots.ROLLOUT_STATE_BAKING, 1
    content.only_tenants.extend(("b", "a"))
    content.never_tenants.append("c")
    content.cordons.add(process_id="decode-0", boot_id="b7", draining=True, reason="disk")
    content.cordons.add(process_id="decode-1")
    content.ended_rollouts.extend(("r-0",))
    content.pools.add(pool="old", model_version="v0", closed=True)
    return found


def test_a_snapshot_is_shown_with_all_its_parts() -> None:
    """In words, in the order of the content."""
    rows = dict(rows_of(tables.snapshot_table(full(), at)))
    assert rows == {
        "snapshot": "7.control-0/3",
        "published": "1795428902",
        "by": "operator",
        "reason": "step 1",
        "pool stable": "stable 90 %, version v1",
        "pool next": "canary 10 %, version v2",
        "pool old": "idle 0 %, version v0, closed",
        "rollout": "r-1",
        "rollout state": "BAKING, step 1",
        "only tenants": "a, b",
        "never tenants": "c",
        "replica decode-0": "draining, boot b7: disk",
        "replica decode-1": "cordoned",
        "taken back": "r-0",
    }


def test_the_difference_marks_what_changed() -> None:
    """Side by side, the earlier one on the left."""
    head, *rows = rows_of(tables.diff_table(view(version=2, canary=0), full()))
    assert head == ["", "part", "7.control-0/2", "7.control-0/3"]
    assert ["*", "pool next", "canary 0 %, version v2", "canary 10 %, version v2"] in rows
    assert ["*", "taken back", "-", "r-0"] in rows
    assert ["", "rollout", "r-1", "r-1"] in rows


@given(TEXTS, TEXTS)
def test_the_difference_has_each_part_once(before: dict[str, str], after: dict[str, str]) -> None:
    """And a part is changed exactly if the contents differ in it."""
    rows = tables.diff_rows(before, after)
    assert sorted(row.part for row in rows) == sorted({*before, *after})
    for row in rows:
        is_equal = before.get(row.part, "-") == after.get(row.part, "-")
        assert row.is_changed != is_equal
    back = tables.diff_rows(after, before)
    assert {row.part for row in back if row.is_changed} == {row.part for row in rows if row.is_changed}


def test_the_history_has_a_row_for_each_snapshot() -> None:
    """Pools without weight are left out."""
    head, row = rows_of(tables.history_table([view()], at))
    assert dict(zip(head, row, strict=True)) == {
        "snapshot": "7.control-0/3",
        "published": "1795428902",
        "by": "operator",
        "weights": "stable 90 %, next 10 %",
        "rollout": "r-1",
        "reason": "step 1",
    }


def test_receivers_show_their_snapshot_and_their_requests() -> None:
    """An unknown number of requests is no 0, and a process without a snapshot has none."""
    found = [
        receiver("decode-0", live=7, silent_s=0.4, is_current=True),
        pb.ReceiverView(process_id="frontend-0", role="frontend", silent_s=75, rejection="no pool"),
    ]
    head, *rows = rows_of(tables.receivers_table(found))
    assert head[-2:] == ["live requests", "last refusal"]
    assert rows == [
        ["decode-0", "decode", "next", "7.control-0/3", "current", "0.4 s ago", "7", "-"],
        ["frontend-0", "frontend", "-", "-", "behind", "1 min 15 s ago", "-", "no pool"],
    ]


def test_markup_in_a_snapshot_is_text() -> None:
    """A reason may come from a person."""
    hostile = "[red]x[/nothing]"
    found = view()
    found.reason = found.by = hostile
    found.content.cordons.add(process_id=hostile, reason=hostile)
    for table in (
        tables.snapshot_table(found, at),
        tables.history_table([found], at),
        tables.diff_table(found, found),
    ):
        assert "[/nothing]" in text_of(table)


def test_an_absent_name_is_a_dash() -> None:
    """No snapshot was published."""
    assert tables.name_text(snapshots.SnapshotName()) == "-"
    assert tables.name_text(name()) == "7.control-0/3"
