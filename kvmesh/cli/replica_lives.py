"""The lives of replicas as the leader tells them, for `kvmesh replicas`. Without a control plane there are none."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from kvmesh.cli.control.client import ControlClient
from kvmesh.cli.control.durations import words
from kvmesh.cli.control.failures import ControlFailed
from kvmesh.cli.found_mesh import FoundMesh
from kvmesh.control.v1 import snapshot_pb2
from kvmesh.control.v1 import warm_up_pb2 as pb

ANSWER_S: Final = 2.0
"""Longest wait for the control plane: the leases alone answer most questions."""

NO_LIFE: Final[dict[str, Any]] = {
    "proof": "",
    "in_state": "",
    "steps": "",
    "package": "",
    "waits_for": "",
    "failed_boots": 0,
    "seeded_blocks": 0,
}
"""Fields of a process without a life."""

_PREFIX: Final = "REPLICA_STATE_"


async def read_lives(mesh: FoundMesh) -> dict[str, dict[str, Any]]:
    """Return the fields of each life by process. Empty: no control plane answers within ANSWER_S."""
    try:
        async with asyncio.timeout(ANSWER_S), ControlClient(mesh) as client:
            found = await client.read("ListLives", pb.ListLivesRequest())
    except (ControlFailed, TimeoutError):
        return {}
    return {each.process_id: life_fields(each) for each in found.lives}


def life_fields(life: pb.Life) -> dict[str, Any]:
    """Return the fields of a life for a row. Pure."""
    is_serving = life.state == snapshot_pb2.REPLICA_STATE_SERVING
    proof = ("proved" if life.proved else "unproved") if is_serving else ""
    return {
        "proof": "self-served" if is_serving and life.self_served and not life.proved else proof,
        "in_state": words(life.age.seconds + life.age.nanos / 1e9),
        "steps": " ".join(f"{_word(each.state)} {_seconds(each)}" for each in life.times),
        "package": life.package,
        "waits_for": life.reason,
        "failed_boots": life.failed_boot_count,
        "seeded_blocks": life.pulled_block_count + life.replayed_block_count,
    }


def _word(state: snapshot_pb2.ReplicaState.ValueType) -> str:
    return snapshot_pb2.ReplicaState.Name(state).removeprefix(_PREFIX).lower()


def _seconds(each: pb.TimeInState) -> str:
    return f"{each.time.seconds + each.time.nanos / 1e9:.1f}s"
