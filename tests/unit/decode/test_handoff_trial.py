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
from services.decode.handoff_trial import BACKOFF_MAX_S, BACKOFF_MIN_S, TRIAL_S, HandoffTrial, TrialState
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
    fail(replica, error)
    assert replica.reader.loads[-1].aggregated
    assert "disaggregated" not in replica.core.capability_names()
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
    assert replica.core.trial.state is TrialState.UNDER_WAY
    replica.pass_time(0.2)
    assert replica.reader.loads[-1].aggregated and not replica.engine.live


@pytest.mark.parametrize("error", [EngineLost("gone"), InvalidRequest("bad"), EngineBusy("full")])
def test_other_failures_say_nothing_about_handoffs(error: CallError) -> None:
    """The next handoff is the trial."""
    replica = Replica(model=STOCK)
    handed(replica)
    fail(replica, error)
    assert replica.core.trial.state is TrialState.OPEN


def test_another_boot_and_a_new_prefill_replica_are_tried_again() -> None:
    """Its handoffs may work. Known replicas are not tried twice."""
    replica = Replica(model=STOCK)
    replica.core.on_sources(frozenset({"a"}))
    handed(replica)
    fail(replica, EngineError("MPI"))
    replica.core.on_sources(frozenset({"a"}))
    assert replica.core.trial.is_aggregated
    replica.core.on_sources(frozenset({"a", "b"}))
    assert replica.core.trial.state is TrialState.OPEN
    handed(replica, 2)
    fail(replica, EngineError("MPI"))
    replica.engine.crash("boot-2", replica.now_s)
    assert replica.core.trial.state is TrialState.OPEN


def test_a_failed_trial_opens_again_after_a_backoff_that_doubles() -> None:
    """A busy engine, or a prefill that died, costs no more than the backoff. A new prefill begins it anew."""
    replica = Replica(model=STOCK)
    backoff_s = BACKOFF_MIN_S

    def state() -> TrialState:
        return replica.core.trial.state

    def is_told() -> bool:
        return replica.reader.loads[-1].aggregated

    for number in range(1, 10):
        handed(replica, number)
        (call_id,) = replica.engine.live
        replica.engine.fail(call_id, EngineStalled("busy"), replica.now_s)
        replica.pass_time(backoff_s - 1.0)
        assert state() is TrialState.FAILED and is_told()
        replica.pass_time(2.0)
        assert state() is TrialState.OPEN and not is_told()
        backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
    assert backoff_s == BACKOFF_MAX_S
    handed(replica, 10)
    fail(replica, EngineStalled("busy"))
    replica.core.on_sources(frozenset({"new"}))
    assert state() is TrialState.OPEN
    handed(replica, 11)
    fail(replica, EngineStalled("busy"))
    replica.pass_time(BACKOFF_MIN_S)
    assert state() is TrialState.OPEN
    handed(replica, 12)
    replica.step(8)
    assert state() is TrialState.PROVED


def test_one_request_at_a_time_is_the_trial() -> None:
    """The others are refused behind a load report that sends their prompts here without a handoff."""
    replica = Replica(model=STOCK)
    replica.submit(1, GENERATION, output=6)
    late = replica.submit(2, GENERATION)
    assert late.refusal is not None and late.refusal.reason == pb.Refusal.REASON_DRAINING
    assert replica.reader.loads[-1].aggregated
    local = replica.submit(3, LOCAL, output=6)
    replica.hand_over(1)
    replica.step(8)
    assert local.ids == expected(PROMPT, 6, -1)
    assert replica.core.trial.state is TrialState.PROVED
    replica.pass_time(0.1)
    assert not replica.reader.loads[-1].aggregated


def test_untried_handoffs_never_run_two_at_a_time() -> None:
    """Whatever ends the trial: a cancel, a failure, a deadline, or a lost engine. The next request is the trial."""
    for seed in range(20):
        rng, replica, number, tries = random.Random(seed), Replica(model=STOCK), 0, 0
        for _ in range(150):
            held = [slot for slot in replica.core.slot_table.slots.values() if not slot.submitted.is_local]
            assert len(held) <= 1
            trial = replica.core.trial
            assert (trial.state is TrialState.UNDER_WAY) == bool(held) and all(map(trial.is_of, held))
            match rng.randrange(6):
                case 0 | 1:
                    number += 1
                    view = replica.submit(number, GENERATION, output=6)
                    tries += view.is_accepted
                    assert view.is_accepted == (trial.state is TrialState.UNDER_WAY and not held)
                case 2 if held:
                    replica.hand_over(held[0].number)
                case 3 if held:
                    replica.send(cancels=[pb.Cancel(slot=held[0].number, reason=pb.Cancel.REASON_CLIENT)])
                case 4 if replica.engine.live:
                    errors = (
                        EngineStalled("hangs"),
                        EngineBusy("full"),
                        InvalidRequest("bad"),
                        EngineLost("gone"),
                    )
                    fail(replica, rng.choice(errors))
                case 5:
                    replica.pass_time(rng.choice((0.1, 10.0, 4 * BACKOFF_MIN_S)))
        assert tries > 5


def test_believed_and_absent_handoffs_are_never_tried() -> None:
    """Whatever comes, a model that promises them stays, and so does one without."""
    rng = random.Random(2)
    for model, state in (
        (facts(), TrialState.PROVED),
        (facts(capabilities=Capabilities()), TrialState.ABSENT),
    ):
        trial = HandoffTrial(model)
        for _ in range(100):
            match rng.randrange(6):
                case 0:
                    trial.on_pulled(model)
                case 1:
                    trial.on_engine_lost()
                case 2:
                    trial.on_failed(model, HandoffLost("x"), 0.0)
                case 3:
                    trial.begin(model)
                case 4:
                    trial.on_timer(1e9)
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
