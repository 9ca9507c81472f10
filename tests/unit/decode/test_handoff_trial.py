"""The trial of an engine that only lists the tensors of a handoff, and the fallback to aggregated serving."""

from __future__ import annotations

import random

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.triton.capabilities import Capabilities
from kvmesh.triton.errors import (
    CallError,
    EngineBusy,
    EngineError,
    EngineLost,
    EngineStalled,
    HandoffLost,
    InvalidRequest,
)
from services.decode.handoff_trial import TRIAL_S, HandoffTrial, TrialState
from tests.unit.decode.test_core import GENERATION, LOCAL, PROMPT, Replica
from tests.unit.triton.fake_engine import expected, facts

STOCK = facts(tries_handoffs=True)


def handed(replica: Replica, slot: int = 1) -> None:
    """Give the engine a handoff."""
    replica.submit(slot, GENERATION, output=6)
    replica.hand_over(slot)


def fail(replica: Replica, error: CallError) -> None:
    """Fail the running call."""
    (call_id,) = replica.engine.live
    replica.engine.fail(call_id, error, replica.now_s)
    replica.pass_time(0.1)


def test_a_handoff_that_works_proves_the_engine() -> None:
    """A later failure is one of that handoff alone."""
    replica = Replica(model=STOCK)
    handed(replica)
    replica.step(8)
    assert replica.core.trial.state is TrialState.PROVED
    handed(replica, 2)
    fail(replica, HandoffLost("expired"))
    assert not replica.core.trial.is_aggregated and not replica.reader.loads[-1].aggregated


@pytest.mark.parametrize("error", [HandoffLost("no"), EngineError("MPI"), EngineStalled("hangs")])
def test_a_handoff_that_fails_makes_the_replica_aggregated(error: CallError) -> None:
    """It says so in its load and its capabilities, refuses handoffs, and runs prompts itself."""
    replica = Replica(model=STOCK)
    handed(replica)
    waiting = replica.submit(2, GENERATION, output=6)
    fail(replica, error)
    assert replica.reader.loads[-1].aggregated
    assert "disaggregated" not in replica.core.capability_names()
    replica.hand_over(2)
    assert waiting.failure is not None and waiting.failure.code == pb.Failure.CODE_HANDOFF_LOST
    late = replica.submit(3, GENERATION)
    assert late.refusal is not None and late.refusal.reason == pb.Refusal.REASON_DRAINING
    local = replica.submit(4, LOCAL, output=6)
    replica.step(6)
    assert local.ids == expected(PROMPT, 6, -1) and replica.is_empty()


def test_a_handoff_that_hangs_is_given_up_soon() -> None:
    """A proved engine has the time of a first token."""
    replica = Replica(model=STOCK)
    handed(replica)
    replica.pass_time(TRIAL_S - 0.1)
    assert replica.core.trial.is_open
    replica.pass_time(0.2)
    assert replica.reader.loads[-1].aggregated and not replica.engine.live


@pytest.mark.parametrize("error", [EngineLost("gone"), InvalidRequest("bad"), EngineBusy("full")])
def test_other_failures_say_nothing_about_handoffs(error: CallError) -> None:
    """The next handoff is the trial."""
    replica = Replica(model=STOCK)
    handed(replica)
    fail(replica, error)
    assert replica.core.trial.is_open


def test_another_boot_and_a_new_prefill_replica_are_tried_again() -> None:
    """Its handoffs may work. Known replicas are not tried twice."""
    replica = Replica(model=STOCK)
    replica.core.on_sources(frozenset({"a"}))
    handed(replica)
    fail(replica, EngineError("MPI"))
    replica.core.on_sources(frozenset({"a"}))
    assert replica.core.trial.is_aggregated
    replica.core.on_sources(frozenset({"a", "b"}))
    assert replica.core.trial.is_open
    handed(replica, 2)
    fail(replica, EngineError("MPI"))
    replica.engine.crash("boot-2", replica.now_s)
    assert replica.core.trial.is_open


def test_believed_and_absent_handoffs_are_never_tried() -> None:
    """Whatever comes, a model that promises them stays, and so does one without."""
    rng = random.Random(2)
    for model, state in (
        (facts(), TrialState.PROVED),
        (facts(capabilities=Capabilities()), TrialState.ABSENT),
    ):
        trial = HandoffTrial(model)
        for _ in range(100):
            match rng.randrange(4):
                case 0:
                    trial.on_pulled()
                case 1:
                    trial.on_engine_lost()
                case 2:
                    trial.on_failed(HandoffLost("x"))
                case _:
                    trial.on_sources(frozenset({rng.random()}))
            assert trial.state is state


def test_engines_without_addresses_exchange_handoffs_and_others_do_not() -> None:
    """An engine with an address pulls from registered addresses alone."""
    for own, is_fine in (("", True), ("127.0.0.1:9", False)):
        replica = Replica(model=facts(kv_address=own))
        replica.core._is_source = lambda address, _: address == ""
        view = replica.submit(1, GENERATION, output=6)
        replica.hand_over(1, address="")
        replica.step(6)
        assert (view.failure is None) == is_fine
