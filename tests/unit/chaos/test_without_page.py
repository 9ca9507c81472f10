"""The section about the mesh without its control plane: it has the figures of its record, and each fault."""

from __future__ import annotations

import msgspec

from tests.chaos.without_page import without_section
from tests.chaos.without_record import Canary, Dead, Drains, WithoutRecord

RECORD = WithoutRecord(
    commit="abc1234",
    machine="two cores",
    began="2026-11-23T12:00:00+00:00",
    command="make without-control DEAD_MINUTES=10 DRAINS=100",
    seconds=1500.0,
    weight_percent=20,
    dead=Dead(
        dead_s=600.0,
        requests=9001,
        lost=0,
        share_before=0.196,
        share_after=0.204,
        moved_sessions=0,
        snapshot_before="1.control-0/8",
        snapshot_after="1.control-0/8",
        deeds=["Redis emptied", "frontend-0 killed and started", "Redis emptied"],
        longest_pause_s=0.47,
    ),
    canary=Canary(
        requests=50,
        refused=0,
        refused_s=0.0,
        sessions=10,
        first_token_s=0.08,
        bound=1,
        direct_snapshot="3.operator:root@vm/1",
        direct_requests=365,
        direct_lost=0,
        direct_canary=0,
    ),
    drains=Drains(by_control=50, by_signal=50, seconds=700.0, requests=8002, lost=0, longest_pause_s=1.5),
)


def test_the_section_has_the_figures() -> None:
    """Requests and losses of each part, and how often each loss was caused."""
    text = "\n".join(without_section(RECORD))
    for figure in (
        "9,001",
        "8,002",
        "50 drains by the control plane",
        "Redis emptied 2 times",
        "19.6 %",
        "20.4 %",
    ):
        assert figure in text, figure
    assert RECORD.faults == []


def test_each_fault_is_shown() -> None:
    """Of the drains, of the dead control plane, and of the dead canary."""
    record = msgspec.json.decode(msgspec.json.encode(RECORD), type=WithoutRecord)
    record.drains.faults, record.dead.faults, record.canary.faults = ["first"], ["second"], ["third"]
    text = "\n".join(without_section(record))
    assert record.faults == ["first", "second", "third"]
    assert all(f"- **{fault}**" in text for fault in record.faults)
