"""Replicas as leases and reports show them: engines with wrong tokens stay out, replicas without engine are not called."""

from __future__ import annotations

import pytest

from controlplane.warmup.fleet import Fleet
from controlplane.warmup.life_state import number_of
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.life_state import LifeState
from kvmesh.membership.member import LIFE, Member

ENGINE = "engine-1"
REPORTED = (LifeState.STARTING, LifeState.WARMING, LifeState.PROBING, LifeState.SERVING)


def member(state: str, *, boot_id: str = "boot-1", engine: str = ENGINE) -> Member:
    """Return the lease of a decode replica."""
    return Member(
        process_id="decode-0",
        role="decode",
        address="decode-0:1",
        boot_id=boot_id,
        model_version="v1",
        block_tokens=4,
        engine_boot_id=engine,
        draining=state != "serving",
        capabilities=(LIFE,),
        state=state,
    )


@pytest.mark.parametrize("reported", REPORTED)
def test_an_engine_with_wrong_tokens_stays_out(reported: LifeState) -> None:
    """A later boot of its process begins in QUARANTINED, whatever it reports and whichever leader found the tokens."""
    fleet = Fleet()
    fleet.list_members([member("quarantined")])
    later = member("starting", boot_id="boot-2")
    fleet.list_members([later])
    life = fleet.begin(
        later, pb.ReplicaLife(state=number_of(reported), engine_boot_id=ENGINE, proved=True), 1.0
    )
    assert life.state is LifeState.QUARANTINED and life.reported is reported and life.reason
    assert not life.is_proved
    (standing,) = fleet.standings(0.0)["default", "decode"]
    assert not standing.is_held and not standing.serves
    other = fleet.begin(later, pb.ReplicaLife(state=number_of(reported), engine_boot_id="engine-2"), 2.0)
    assert other.state is reported, "only a new boot of the engine ends it"


def test_the_reason_of_this_leader_is_kept() -> None:
    """The lease and the report of a quarantined replica do not replace the reason of the leader that found it."""
    fleet = Fleet()
    fleet.quarantined[ENGINE] = "wrong golden tokens: prompt 3"
    fleet.list_members([member("quarantined")])
    report = pb.ReplicaLife(state=number_of(LifeState.QUARANTINED), engine_boot_id=ENGINE)
    assert fleet.begin(member("quarantined"), report, 1.0).reason == "wrong golden tokens: prompt 3"


@pytest.mark.parametrize(("engine", "is_held"), [("", False), (ENGINE, True)])
def test_a_replica_without_engine_is_not_called_into_service(engine: str, is_held: bool) -> None:
    """The rule that holds replicas back counts it among those that do not serve."""
    fleet = Fleet()
    lease = member("starting", engine=engine)
    fleet.list_members([lease])
    fleet.begin(lease, pb.ReplicaLife(state=number_of(LifeState.STARTING), engine_boot_id=engine), 1.0)
    (standing,) = fleet.standings(0.0)["default", "decode"]
    assert standing.is_held is is_held and not standing.serves
