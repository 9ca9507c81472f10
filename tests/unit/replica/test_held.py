"""Cores of held and quarantined replicas: their load reports, and the submits that they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.life_state import SLOW_START_S, LifeState
from kvmesh.replica.life_view import IN_SERVICE, LifeView
from tests.unit.decode import test_core as decode
from tests.unit.prefill import test_core as prefill
from tests.unit.triton.reader import SlotView, submit

ROLES = [
    pytest.param(prefill.Replica, pb.PHASE_CONTEXT_ONLY, id="prefill"),
    pytest.param(decode.Replica, pb.PHASE_CONTEXT_AND_GENERATION, id="decode"),
]
CONTROL = (budget_pb2.PURPOSE_WARM_UP, budget_pb2.PURPOSE_PROBE)


def send(replica: Any, slot: int, phase: pb.Phase.ValueType, purpose: int) -> SlotView:
    """Submit an attempt of `purpose` and read the answer."""
    message = submit(slot, prefill.PROMPT, phase)
    message.budget.purpose = purpose  # type: ignore[assignment]
    view: SlotView = replica.reader.open(slot, 0)
    replica.send(submits=[message])
    return view


@pytest.mark.parametrize(("make", "phase"), ROLES)
@pytest.mark.parametrize("state", [*LifeState])
def test_only_a_quarantined_replica_refuses_users(
    make: Any, phase: pb.Phase.ValueType, state: LifeState
) -> None:
    """A held one takes a late request; warm-up and probes are taken in every state. A shadow request is a user's here."""
    for purpose in budget_pb2.Purpose.values():
        replica = make()
        replica.core.set_life(LifeView(state, "prompt 3 gave other tokens"))
        view = send(replica, 1, phase, purpose)
        if state is not LifeState.QUARANTINED or purpose in CONTROL:
            assert view.refusal is None, purpose
            continue
        assert view.refusal is not None, purpose
        assert view.refusal.reason == pb.Refusal.REASON_DRAINING
        assert view.refusal.message.endswith("-0 is quarantined: prompt 3 gave other tokens")


@pytest.mark.parametrize(("make", "phase"), ROLES)
def test_the_load_report_follows_the_life(make: Any, phase: pb.Phase.ValueType) -> None:
    """A held replica says `draining`, too, for routers of release 0.1.0. Each change sends a report."""
    replica = make()
    core = replica.core
    report = core.load_report(replica.now_s)
    assert not report.held and not report.draining and not report.slow_start_age_ms
    for state in LifeState:
        core.set_life(LifeView(state))
        assert core.next_wake_s() <= replica.now_s + 1.0
        report = core.load_report(replica.now_s)
        assert report.held == report.draining == (state is not LifeState.SERVING)
    core.set_life(LifeView(slow_start_s=replica.now_s - 2.0))
    ages = [
        core.load_report(replica.now_s + later_s).slow_start_age_ms
        for later_s in (0.0, 1.0, SLOW_START_S - 2.0)
    ]
    assert ages == [2000, 3000, 0]


@pytest.mark.parametrize(("make", "phase"), ROLES)
def test_a_drain_goes_on_behind_a_life(make: Any, phase: pb.Phase.ValueType) -> None:
    """The end of the warm-up does not end a drain."""
    replica = make()
    replica.core.drain()
    replica.core.set_life(LifeView(LifeState.WARMING))
    replica.core.set_life(IN_SERVICE)
    report = replica.core.load_report(replica.now_s)
    assert report.draining and not report.held
