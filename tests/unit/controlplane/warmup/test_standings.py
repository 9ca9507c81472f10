"""Replicas as the hold-back rule sees them: reports come at once, leases are read a while later."""

from __future__ import annotations

import pytest

from controlplane.warmup.fleet import Fleet
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
