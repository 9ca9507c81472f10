"""Messages of the control plane for tests of the commands."""

from __future__ import annotations

import io
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console

from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.control.v1 import snapshot_pb2 as snapshots

STATES = [state for state in snapshots.RolloutState.values() if state]
FINAL = (
    snapshots.ROLLOUT_STATE_COMPLETED,
    snapshots.ROLLOUT_STATE_ROLLED_BACK,
    snapshots.ROLLOUT_STATE_ABORTED,
)


def rollout(state: Any = snapshots.ROLLOUT_STATE_BAKING, **more: Any) -> pb.Rollout:
    """Return a rollout from stable to next, in its second step."""
    fields = {
        "rollout": "r-1",
        "settings": pb.RolloutSettings(to_pool="next", baseline_pool="young", steps_percent=(10, 50, 100)),
        "state": state,
        "step": 2,
        "weight_percent": 50,
        "from_pool": "stable",
        "from_version": "v1",
        "to_version": "v2",
        "started_at": Timestamp(seconds=1_795_428_902),
        "revision": 3,
    }
    return pb.Rollout(**{**fields, **more})


def name(number: int = 7, version: int = 3, leader: str = "control-0") -> snapshots.SnapshotName:
    """Return the name of a snapshot."""
    return snapshots.SnapshotName(term=snapshots.Term(number=number, leader=leader), version=version)


def pool(
    pool_name: str, track: Any = snapshots.TRACK_UNSPECIFIED, weight: int = 0, version: str = "v1"
) -> Any:
    """Return a pool of a content."""
    return snapshots.PoolTrack(pool=pool_name, model_version=version, track=track, weight_percent=weight)


def view(version: int = 3, canary: int = 10, **content: Any) -> pb.SnapshotView:
    """Return a snapshot with this weight of the canary."""
    pools = [
        pool("stable", snapshots.TRACK_STABLE, 100 - canary),
        pool("next", snapshots.TRACK_CANARY, canary, "v2"),
    ]
    made = snapshots.SnapshotContent(pools=pools, rollout="r-1", published_ms=1_795_428_902_000, **content)
    return pb.SnapshotView(name=name(version=version), content=made, reason="step 1", by="operator")


def receiver(process_id: str, version: int = 3, live: int | None = None, **more: Any) -> pb.ReceiverView:
    """Return a receiver with a snapshot of this version."""
    return pb.ReceiverView(
        process_id=process_id,
        **{
            "role": "decode",
            "pool": "next",
            "applied": name(version=version),
            "live_request_count": live,
            **more,
        },
    )


def text_of(*parts: Any, width: int = 200) -> str:
    """Return the text of tables on a terminal of this width."""
    console = Console(width=width, record=True, force_terminal=False, file=io.StringIO())
    for part in parts:
        console.print(part, markup=False, highlight=False)
    return console.export_text()


def rows_of(table: Any) -> list[list[str]]:
    """Return the cells of a table, its head first."""
    lines = [line for line in text_of(table).splitlines() if line and line[0] in "┃│"]
    return [[cell.strip() for cell in line[1:-1].replace("┃", "│").split("│")] for line in lines]
