"""The progress of a drain, from the command to an empty process."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.cli.control.progress import DrainState, drain_progress
from kvmesh.control.v1 import control_pb2 as pb
from tests.unit.cli.control.messages import receiver, view


def drained(version: int = 3, **more: Any) -> pb.SnapshotView:
    """Return a snapshot that drains decode-0."""
    found = view(version=version)
    found.content.cordons.add(process_id="decode-0", draining=True, **more)
    return found


def state(snapshot: pb.SnapshotView, *receivers: pb.ReceiverView, was_published: bool = True) -> DrainState:
    """Return the state of the drain of decode-0."""
    return drain_progress("decode-0", snapshot, receivers, was_published=was_published).state


CURRENT = receiver("decode-0", 3, 0)


@pytest.mark.parametrize(
    ("receivers", "expected"),
    [
        ([CURRENT], DrainState.EMPTY),
        ([receiver("decode-0", 4, 0)], DrainState.EMPTY),
        ([receiver("decode-0", 3, 2)], DrainState.DRAINING),
        ([receiver("decode-0", 3)], DrainState.DRAINING),
        ([receiver("decode-0", 2, 0)], DrainState.UNHEARD),
        ([receiver("decode-0", 3, silent_s=9.0)], DrainState.SILENT),
        ([receiver("decode-1", 3, 0)], DrainState.GONE),
        ([], DrainState.GONE),
    ],
)
def test_states(receivers: list[pb.ReceiverView], expected: DrainState) -> None:
    """Empty is only a process that has the drain and reports no request: missing data is not 0."""
    assert state(drained(), *receivers) is expected


def test_before_the_snapshot_there_is_no_drain() -> None:
    """A plain cordon, or a drain of another process, is none either."""
    assert state(view(), CURRENT, was_published=False) is DrainState.UNPUBLISHED
    cordoned = view()
    cordoned.content.cordons.add(process_id="decode-0")
    cordoned.content.cordons.add(process_id="decode-1", draining=True)
    assert state(cordoned, CURRENT, was_published=False) is DrainState.UNPUBLISHED


def test_a_drain_that_is_gone_from_the_snapshot_was_taken_back() -> None:
    """Only after a snapshot had it."""
    assert state(view(), CURRENT) is DrainState.UNCORDONED
    assert state(drained(), was_published=False) is DrainState.UNHEARD


def test_each_progress_is_a_sentence() -> None:
    """With the number of requests while there are some."""
    words = [
        drain_progress("decode-0", drained(), [each], was_published=True).sentence("decode-0")
        for each in (
            receiver("decode-0", 3, 1200),
            receiver("decode-0", 3, 1),
            receiver("decode-0", 3),
            CURRENT,
        )
    ]
    assert words == [
        "decode-0 drains: 1,200 live requests.",
        "decode-0 drains: 1 live request.",
        "decode-0 drains: an unknown number of live requests.",
        "decode-0 is empty.",
    ]
