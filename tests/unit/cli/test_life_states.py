"""The state of a replica's life in the tables of the command line."""

from __future__ import annotations

import pytest

from kvmesh.cli.replicas import rows_of
from kvmesh.cli.status import ProcessStatus, Sample
from kvmesh.life_state import LifeState
from kvmesh.membership.member import Member


@pytest.mark.parametrize("state", [*LifeState])
def test_status_names_a_replica_that_is_out_of_service(state: LifeState) -> None:
    """A replica in service is the usual case and gets no word."""
    metrics = [
        Sample(name="kvmesh_decode_replica_state", labels={"state": each.value}, value=float(each is state))
        for each in LifeState
    ]
    report = ProcessStatus(name="d", role="decode", address="", is_healthy=True, metrics=metrics)
    assert report.usage_text() == ("" if state is LifeState.SERVING else state.value)


def test_replicas_shows_the_state_of_the_life() -> None:
    """A held replica says in its lease that it drains, but that is not its state. Release 0.1.0 leases no state."""
    members = [
        Member(
            process_id=f"decode-{index}",
            role="decode",
            address="127.0.0.1:1",
            boot_id="b",
            model_version="v",
            block_tokens=16,
            state=state,
            draining=is_draining,
        )
        for index, (state, is_draining) in enumerate(
            (("warming", True), ("quarantined", True), ("serving", False), ("", True), ("", False))
        )
    ]
    states = [row["state"] for row in rows_of(members)]
    assert states == ["warming", "quarantined", "serving", "draining", "registered"]
