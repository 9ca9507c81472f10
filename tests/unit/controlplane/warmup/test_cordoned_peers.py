"""A cordoned replica carries no load, so it holds no fresh replica back."""

from __future__ import annotations

import pytest

from controlplane.warmup.fleet import Fleet
from controlplane.warmup.hold_back import released
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.membership.member import Member


def lease(name: str, state: str, *, draining: bool) -> Member:
    return Member(
        process_id=name,
        role="decode",
        address=f"{name}:1",
        boot_id=f"boot-{name}",
        model_version="v1",
        block_tokens=4,
        engine_boot_id=f"engine-{name}",
        draining=draining,
        capabilities=("life",),
        state=state,
    )


@pytest.mark.parametrize("state", ["cordoned", "draining"])
@pytest.mark.parametrize("has_life", [True, False])
def test_a_fresh_replica_beside_cordoned_ones_goes_into_service(state: str, *, has_life: bool) -> None:
    fleet = Fleet()
    aside = lease("decode-0", state, draining=True)
    fresh = lease("decode-1", "starting", draining=True)
    fleet.list_members([aside, fresh])
    if has_life:
        fleet.begin(
            aside, pb.ReplicaLife(state=pb.REPLICA_STATE_SERVING, engine_boot_id="engine-decode-0"), 0.0
        )
    fleet.begin(fresh, pb.ReplicaLife(state=pb.REPLICA_STATE_STARTING, engine_boot_id="engine-decode-1"), 0.0)
    assert released(fleet.standings(0.0)["default", "decode"], 0.0) == ["decode-1"]


def test_a_cordoned_fresh_replica_is_not_released_in_place_of_another() -> None:
    fleet = Fleet()
    aside, fresh = lease("decode-0", "cordoned", draining=True), lease("decode-1", "starting", draining=True)
    fleet.list_members([aside, fresh])
    for member, state in ((aside, pb.REPLICA_STATE_PROBING), (fresh, pb.REPLICA_STATE_STARTING)):
        fleet.begin(member, pb.ReplicaLife(state=state, engine_boot_id=member.engine_boot_id), 0.0)
    assert released(fleet.standings(0.0)["default", "decode"], 0.0) == ["decode-1"]
