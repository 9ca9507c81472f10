"""Replicas as the hold-back rule sees them: reports come at once, leases are read a while later."""

from __future__ import annotations

import pytest

from controlplane.warmup.fleet import Fleet
from controlplane.warmup.jobs import PassResult
from controlplane.warmup.life import WARM_BY_SERVICE_S
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.membership.member import Member

STATES = {
    "starting": pb.REPLICA_STATE_STARTING,
    "probing": pb.REPLICA_STATE_PROBING,
    "serving": pb.REPLICA_STATE_SERVING,
    "quarantined": pb.REPLICA_STATE_QUARANTINED,
}


def _serves(lease: str, reported: str, *, draining: bool) -> bool:
    fleet = Fleet()
    member = Member(
        process_id="a",
        role="prefill",
        address="a:1",
        boot_id="b",
        model_version="v1",
        block_tokens=4,
        state=lease,
        draining=draining,
        capabilities=("life",),
        engine_boot_id="e",
    )
    fleet.list_members([member])
    fleet.begin(member, pb.ReplicaLife(state=STATES[reported], engine_boot_id="e"), 0.0)
    (standing,) = fleet.standings("default", "prefill", 0.0)
    return standing.serves


@pytest.mark.parametrize("lease", ["starting", "probing", "serving"])
def test_a_replica_that_reports_service_serves(lease: str) -> None:
    """Its lease still says that it is held. No other replica is released meanwhile."""
    assert _serves(lease, "serving", draining=lease != "serving")


@pytest.mark.parametrize("lease", ["draining", "cordoned", ""])
def test_a_replica_that_leaves_does_not_serve(lease: str) -> None:
    """A drain, a cordon, or a drain of a release that writes no state."""
    assert not _serves(lease, "serving", draining=True)


@pytest.mark.parametrize("reported", ["starting", "probing", "quarantined"])
def test_held_and_quarantined_replicas_do_not_serve(reported: str) -> None:
    """Whatever their leases said before."""
    assert not _serves("serving", reported, draining=False)


def test_a_replica_in_service_is_cold_until_its_passes_or_its_users_warmed_it() -> None:
    """So is one that is called into service. An engine that served before is warm, and so is a process without a life."""
    fleet = Fleet()
    members = [
        Member(
            process_id=name,
            role="prefill",
            address="a:1",
            boot_id="b",
            model_version="v1",
            block_tokens=4,
            capabilities=("life",),
            engine_boot_id=f"engine-{name}",
        )
        for name in ("fresh", "hurried", "known", "passed", "stranger")
    ]
    fleet.list_members(members)
    fleet.served["engine-known"] = None
    for member in members[:-1]:
        state = pb.REPLICA_STATE_PROBING if member.process_id == "hurried" else pb.REPLICA_STATE_SERVING
        report = pb.ReplicaLife(state=state, engine_boot_id=member.engine_boot_id)
        life = fleet.begin(member, report, 0.0)
        life.is_hurried = state == pb.REPLICA_STATE_PROBING
        if member.process_id == "passed":
            life.passes = [PassResult(1.0, 0)]

    def cold(now_s: float) -> list[str]:
        standings = fleet.standings("default", "prefill", now_s)
        assert all(each.serves for each in standings)
        return [each.process_id for each in standings if each.is_cold]

    assert cold(WARM_BY_SERVICE_S - 1) == ["fresh", "hurried"]
    assert cold(WARM_BY_SERVICE_S) == ["hurried"], "the time of its service has not begun"
