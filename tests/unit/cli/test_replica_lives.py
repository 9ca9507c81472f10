"""The life of a replica as fields of a row: proof, times, package, and what it waits for."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration

from kvmesh.cli.replica_lives import NO_LIFE, life_fields
from kvmesh.control.v1 import snapshot_pb2 as states
from kvmesh.control.v1 import warm_up_pb2 as pb


def seconds(value: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(value * 1e9))
    return duration


@pytest.mark.parametrize("state", states.ReplicaState.values())
@pytest.mark.parametrize("proved", [False, True])
@pytest.mark.parametrize("self_served", [False, True])
def test_only_a_replica_in_service_has_a_proof(state: int, proved: bool, self_served: bool) -> None:
    """Self-served is said of one without a proof only."""
    life = pb.Life(state=states.ReplicaState.ValueType(state), proved=proved, self_served=self_served)
    wanted = "proved" if proved else "self-served" if self_served else "unproved"
    assert life_fields(life)["proof"] == (wanted if state == states.REPLICA_STATE_SERVING else "")


def test_every_field_is_there() -> None:
    """The keys are those of a process without a life, so that rows have the same ones."""
    life = pb.Life(
        state=states.REPLICA_STATE_SEEDING,
        age=seconds(75.4),
        times=[
            pb.TimeInState(state=states.REPLICA_STATE_STARTING, time=seconds(0.04)),
            pb.TimeInState(state=states.REPLICA_STATE_WARMING, time=seconds(12.34)),
        ],
        package="v1.prefill.0",
        reason="copies hot prefixes from 1 replicas",
        failed_boot_count=2,
        pulled_block_count=3,
        replayed_block_count=4,
    )
    fields = life_fields(life)
    assert fields == {
        "proof": "",
        "in_state": fields["in_state"],
        "steps": "starting 0.0s warming 12.3s",
        "package": "v1.prefill.0",
        "waits_for": "copies hot prefixes from 1 replicas",
        "failed_boots": 2,
        "seeded_blocks": 7,
    }
    assert fields.keys() == NO_LIFE.keys() and fields["in_state"] == "1 min 15 s"
    assert {name: type(value) for name, value in fields.items()} == {
        name: type(value) for name, value in NO_LIFE.items()
    }
