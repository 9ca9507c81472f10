"""Replicas that are warmed up before they serve: the router attaches to them and places nothing."""

from __future__ import annotations

import random

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.life_state import LifeState
from kvmesh.membership.member import Member
from services.router.forwarding.replica_links import ReplicaHost
from services.router.placement.policy import Event, LoadReported
from tests.unit.router.desk import Desk

HELD = pb.LoadReport(engine_ready=True, draining=True, held=True, block_total_count=100)
SERVING = pb.LoadReport(engine_ready=True, block_total_count=100)


def lease(state: str, *, is_draining: bool) -> Member:
    """Return the lease of decode-0."""
    return Member(
        process_id="decode-0",
        role="decode",
        address="127.0.0.1:1",
        boot_id="b",
        model_version="m",
        block_tokens=4,
        state=state,
        draining=is_draining,
    )


def host_of(desk: Desk) -> ReplicaHost:
    """Return the host of the desk's core, for its treatment of leases."""
    return ReplicaHost(
        desk.core,
        pb.Hello(),
        lambda _: True,
        None,  # type: ignore[arg-type]  # no link is opened
        lambda address, role: None,  # type: ignore[arg-type, return-value]
        lambda names: None,
        dialer=object(),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("seed", range(20))
def test_its_speed_is_forgotten_once_for_each_time_that_it_was_held(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under any schedule of reports, leases and lost streams, and never while it is held."""
    rng, desk, seen = random.Random(seed), Desk(), list[LoadReported]()
    observe = desk.policy.observe

    def record(event: Event) -> None:
        if isinstance(event, LoadReported):
            seen.append(event)
        observe(event)

    monkeypatch.setattr(desk.policy, "observe", record)
    host, was_held = host_of(desk), False
    replica, link = desk.links["decode-0"]
    for _ in range(300):
        desk.now_s += 0.1
        match rng.randrange(4):
            case 0 if replica.is_up:
                desk.lose("decode-0")
            case 0:
                replica.on_attached(link, pb.Hello(), desk.now_s)
            case 1:
                state = rng.choice([*LifeState])
                is_out = state is not LifeState.SERVING
                host.on_listed(replica, lease(state.value, is_draining=is_out))
                if replica.load.report is None:
                    was_held |= is_out
                    assert replica.is_held == is_out
                assert not replica.is_draining
            case _ if replica.is_up:
                report = rng.choice((HELD, SERVING))
                desk.down("decode-0", load_report=report)
                assert seen[-1].is_fresh == (was_held and not report.held), seed
                was_held = report.held
                assert replica.is_placeable() is not report.held


@pytest.mark.parametrize("state", [state for state in LifeState if state is not LifeState.SERVING])
def test_nothing_is_placed_before_the_first_report_of_a_held_replica(state: LifeState) -> None:
    """The lease says so. Later the load report decides, because a lease may be old: Redis may be away."""
    desk = Desk()
    replica, _ = desk.links["decode-0"]
    host_of(desk).on_listed(replica, lease(state.value, is_draining=True))
    assert not replica.is_placeable() and not replica.is_in_service()
    desk.down("decode-0", load_report=SERVING)
    host_of(desk).on_listed(replica, lease(state.value, is_draining=True))
    assert replica.is_placeable()


def test_a_replica_that_drains_is_not_taken_for_a_held_one() -> None:
    """Leases of every release say `draining` when the process leaves."""
    desk = Desk()
    replica, _ = desk.links["decode-0"]
    desk.down("decode-0", load_report=SERVING)
    for state in ("", "draining", "cordoned"):
        host_of(desk).on_listed(replica, lease(state, is_draining=True))
        assert replica.is_draining and not replica.is_placeable()
