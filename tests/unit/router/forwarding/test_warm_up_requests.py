"""Requests that no user waits for pass a router through prefill and decode, and leave no trace in what it has learnt."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.metrics import Metrics
from services.router.forwarding.attempt import Attempt, Stage, Submission
from services.router.telemetry import ForwardingTelemetry
from tests.unit.router.desk import Desk, first, frame

PURPOSES = (budget_pb2.PURPOSE_WARM_UP, budget_pb2.PURPOSE_PROBE)


def warm(desk: Desk, number: int = 1, purpose: Any = budget_pb2.PURPOSE_WARM_UP, tokens: int = 4) -> int:
    """Submit a request of `purpose`; return its slot."""
    return desk.submit(
        f"{number:032x}",
        tokens=tokens,
        output=2,
        remaining_ms=2000,
        priority_class=0,
        priority=-100,
        sheddable=True,
        purpose=purpose,
    )


def learnt(desk: Desk) -> tuple[Any, ...]:
    """Return all that a router learns from requests, and all shares of tenants."""
    core, policy = desk.core, desk.policy
    return (
        repr([(number, len(one.fairness)) for number, one in core.queue._priority_classes.items()]),
        list(core.queue.released_totals),
        len(core.work.reservations),
        core.admission.arrived.count,
        core.admission.refusals.total(),
        core.dispatcher.queue_delay.wait_s(1000.0, desk.now_s),
        policy.costs.observation_total,
        policy.costs.coefficients,
        policy.prefills.typical_s,
        policy.prefills._dispatch_total,
        policy.measured_total_s,
        len(policy.backlog),
        policy.local_index.in_flight_block_count,
    )


def run(desk: Desk, slot: int) -> None:
    """Let replicas serve the request of `slot`."""
    decode, submit = desk.placed()
    assert submit.phase == pb.PHASE_GENERATION_ONLY and submit.budget.purpose in PURPOSES
    desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)])
    (asked,) = desk.up("prefill-0").submits
    desk.down("prefill-0", starts=[pb.Start(slot=asked.slot)])
    desk.down("prefill-0", first_tokens=[first(asked.slot)])
    desk.down(decode, transfers=[pb.Transfer(slot=submit.slot)], frame=frame(submit.slot, 1, 1))
    finish = pb.Finish(slot=submit.slot, end_position=2, reason=pb.Finish.REASON_LENGTH)
    desk.down(decode, finishes=[finish])
    told = desk.told()
    assert [each.slot for each in told.finishes] == [slot] and sum(told.frame.counts) == 1
    for name in ("prefill-0", "decode-0", "decode-1"):
        desk.up(name)


@pytest.mark.parametrize("purpose", PURPOSES)
def test_a_warm_up_goes_through_a_pair_and_leaves_no_trace(purpose: int) -> None:
    """Although its prompt is short enough for decode alone: each hop takes part, and nothing is learnt."""
    desk = Desk(local=1 << 20)
    before = learnt(desk)
    for number in range(20):
        run(desk, warm(desk, number, purpose))
        assert learnt(desk) == before
    desk.assert_empty()


def test_a_user_of_the_same_size_leaves_a_trace() -> None:
    """The comparison of the test above can fail."""
    desk = Desk()
    before = learnt(desk)
    desk.generating()
    assert learnt(desk) != before


@pytest.mark.parametrize("seed", range(100))
def test_users_are_placed_alike_with_and_without_warm_ups(seed: int) -> None:
    """Warm-ups between random requests, answers and losses change no count of the users' side."""
    desks = [Desk(queue=4), Desk(queue=4)]
    draw = random.Random(seed)
    for step in range(12):
        tenant, tokens, ends = draw.choice(("a", "b")), draw.choice((4, 20, 40)), draw.random() < 0.7
        for is_warmed, desk in enumerate(desks):
            if is_warmed and not len(desk.core.queue) and step % 2:
                slot = warm(desk, 1000 + step)
                if any(each.slot == slot for each in desk.told().refusals):
                    continue
                desk.ask(cancels=[pb.Cancel(slot=slot, reason=pb.Cancel.REASON_DEADLINE)])
                for name in desk.links:
                    desk.up(name)
        for desk in desks:
            slot = desk.submit(f"{step:032x}", tokens=tokens, tenant=tenant)
            if ends:
                desk.ask(cancels=[pb.Cancel(slot=slot, reason=pb.Cancel.REASON_CLIENT)])
            desk.told()
            desk.wait(0.01)
        assert learnt(desks[0]) == learnt(desks[1])


def test_a_warm_up_is_refused_while_users_wait() -> None:
    """A request of a user waits for KV blocks. The warm-up would fit beside it, and does not pass it."""
    desk = Desk()
    for number in range(2):
        desk.generating(request_id=f"{100 + number:032x}", tokens=40)
    small = pb.LoadReport(engine_ready=True, block_total_count=20, block_reserved_count=13)
    for name in ("decode-0", "decode-1"):
        desk.down(name, load_report=small)
    desk.submit(f"{102:032x}", tokens=40, sheddable=True, priority_class=0)
    assert len(desk.core.queue) == 1
    desk.told()
    slot = warm(desk)
    (refusal,) = desk.told().refusals
    assert refusal.slot == slot and refusal.reason == pb.Refusal.REASON_QUEUE_FULL and not refusal.evicted
    assert len(desk.core.queue) == 1 and desk.core.queue.evicted_total == 0


def test_a_warm_up_that_decode_refuses_is_refused_and_not_queued() -> None:
    """No retry: the frontend serves without it."""
    desk = Desk()
    slot = warm(desk)
    decode, submit = desk.placed()
    desk.told()
    desk.down(decode, refusals=[pb.Refusal(slot=submit.slot, reason=pb.Refusal.REASON_KV_FULL)])
    assert [each.slot for each in desk.told().refusals] == [slot]
    assert not len(desk.core.queue)
    desk.assert_empty()


def test_a_warm_up_at_a_lost_replica_fails_and_is_not_queued() -> None:
    """A lost prefill ends it; no other replica is tried."""
    desk = Desk(prefills=2)
    slot = warm(desk)
    decode, submit = desk.placed()
    desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)])
    name = next(each for each in ("prefill-0", "prefill-1") if desk.up(each).submits)
    desk.lose(name)
    assert [each.slot for each in desk.told().failures] == [slot]
    desk.assert_empty()


def test_telemetry_counts_warm_ups_apart() -> None:
    """They are in no count and no histogram of users."""
    metrics, no_tracing = Metrics("router"), None
    telemetry = ForwardingTelemetry(metrics, no_tracing, 4)  # type: ignore[arg-type]  # a span would fail
    before = metrics.text()
    submitted = Submission("0" * 32, 1, 0.0, purpose="warm_up", traceparent="00-1-2-01")
    attempt = Attempt(submitted, 1, None, None, 0, 0, stage=Stage.ENDED)
    telemetry(attempt, "REASON_LENGTH", 1.0)
    added = set(metrics.text().decode().splitlines()) - set(before.decode().splitlines())
    assert [line for line in added if not line.startswith("#")] == [
        'kvmesh_router_control_calls_total{outcome="REASON_LENGTH",purpose="warm_up"} 1.0'
    ]
