"""Admission control and load shedding at the router: its queue bounds, its deadline check, its refusals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.forwarding.replica_load import STEPS_KEPT_S
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.cost_policy import CostPolicy
from services.router.placement.decode_choice import DecodeChoice
from services.router.placement.policy import (
    Dispatched,
    Finished,
    Hit,
    Measured,
    PlacementRequest,
    PoolView,
    ReplicaState,
)
from services.router.placement.shortlist import Match
from tests.unit.router.desk import Desk


class FixedForecast:
    """A forecast of fixed seconds for each prompt token."""

    def __init__(self, token_s: float) -> None:
        self.is_known = True
        self.is_measured = True
        self.token_s = token_s

    def knows_costs(self) -> bool:
        return self.is_known

    def is_fresh(self, now_s: float) -> bool:
        return self.is_known and self.is_measured

    def may_refuse(self, now_s: float) -> bool:
        return self.is_fresh(now_s)

    def expected(
        self, hashes: Sequence[int], token_count: int, prefill: Sequence[ReplicaState]
    ) -> tuple[int, float]:
        return token_count, token_count * self.token_s


def name(number: int) -> str:
    return f"{number:032x}"


def busy(desk: Desk, count: int, **fields: Any) -> None:
    """Let one request be at prefill and `count` wait: this tests their order, not their placement."""
    desk.reserved(request_id=name(1000))
    for number in range(count):
        desk.submit(request_id=name(number), **fields)
    assert not desk.told().refusals


def test_a_full_queue_evicts_the_least_important_request() -> None:
    """A sheddable request is evicted for a new one.

    The next sheddable one finds no less important request and is refused.
    """
    desk = Desk(queue=3)
    busy(desk, 2)
    desk.submit(request_id=name(7), sheddable=True)
    assert not desk.told().refusals
    desk.submit(request_id=name(8))
    (refusal,) = desk.told().refusals
    assert refusal.reason == pb.Refusal.REASON_QUEUE_FULL and refusal.evicted and refusal.retry_after_ms
    assert desk.core.queue.evicted_total == 1 and desk.ended == ["evicted"]
    desk.submit(request_id=name(9))
    (refusal,) = desk.told().refusals
    assert refusal.reason == pb.Refusal.REASON_QUEUE_FULL and not refusal.evicted and refusal.retry_after_ms
    assert len(desk.core.queue) == 3


def test_the_queue_is_bounded_in_tokens_too() -> None:
    """The bound of tokens holds for new requests. A single long prompt is taken all the same."""
    desk = Desk()
    desk.core.queue.tokens_max = 50
    busy(desk, 1, tokens=400)
    desk.submit(request_id=name(7), tokens=20)
    (refusal,) = desk.told().refusals
    assert refusal.reason == pb.Refusal.REASON_QUEUE_FULL and "400 tokens" in refusal.message
    desk.submit(request_id=name(8), tokens=20, resumed=True, attempt=2)
    assert not desk.told().refusals


def test_a_request_with_a_long_queue_delay_is_refused() -> None:
    """The delay is estimated from the drain rate.

    A higher priority class and a resumed request do not wait behind the backlog.
    """
    desk = Desk(queue=100)
    queue_delay = desk.core.dispatcher.queue_delay
    busy(desk, 30, tokens=200)
    begun_s = desk.now_s
    for _ in range(20):
        desk.now_s += 0.1
        queue_delay.released(20, desk.now_s)  # 200 tokens a second: 30 s of work wait
    assert desk.now_s > begun_s
    desk.submit(request_id=name(40), tokens=200)
    (refusal,) = desk.told().refusals
    assert refusal.reason == pb.Refusal.REASON_QUEUE_FULL and not refusal.evicted
    assert 20_000 < refusal.retry_after_ms <= 30_000 and "29.9 s" in refusal.message
    desk.submit(request_id=name(41), tokens=200, priority_class=6)
    desk.submit(request_id=name(42), tokens=200, resumed=True, attempt=2)
    desk.submit(request_id=name(43), tokens=20, tenant="quiet")
    assert not desk.told().refusals
    assert desk.core.load_report().queue_delay_us > 0


def test_a_request_is_not_refused_for_work_that_it_overtakes() -> None:
    """Half a minute of work waits. None of it is ahead of a short request, all of it is ahead of a long one."""
    desk = Desk(queue=100)
    desk.core.dispatcher.forecast = FixedForecast(0.01)
    busy(desk, 30, tokens=200)
    for _ in range(20):
        desk.now_s += 0.1
        desk.core.dispatcher.queue_delay.released(20, desk.now_s)
    desk.submit(request_id=name(40), tokens=30)
    assert not desk.told().refusals and next(iter(desk.core.queue)).submitted.request_id == name(40)
    desk.submit(request_id=name(41), tokens=300)
    (refusal,) = desk.told().refusals
    assert refusal.reason == pb.Refusal.REASON_QUEUE_FULL and "30.0 s" in refusal.message


@pytest.mark.parametrize("limit", [{"remaining_ms": 1500}, {"ttft_ms": 1500}])
def test_a_request_that_cannot_meet_its_deadline_is_refused_with_the_estimate(limit: dict[str, int]) -> None:
    """It is refused before any reservation. With unknown costs, a cached prompt or a resumed request, it is admitted."""
    desk = Desk()
    forecast = FixedForecast(0.1)
    desk.core.dispatcher.forecast = forecast
    desk.submit(request_id=name(1), tokens=20, **limit)
    (refusal,) = desk.told().refusals
    assert refusal.reason == pb.Refusal.REASON_DEADLINE and refusal.estimate_ms == 2000
    assert all(not replica.slots for replica, _ in desk.links.values())
    assert desk.core.admission.refusals == {pb.Refusal.REASON_DEADLINE: 1}
    desk.core.dispatcher.forecast = FixedForecast(0.01)
    desk.submit(request_id=name(2), tokens=20, **limit)
    desk.core.dispatcher.forecast = forecast
    desk.submit(request_id=name(3), tokens=20, resumed=True, attempt=2, **limit)
    forecast.is_known = False
    desk.submit(request_id=name(4), tokens=20, **limit)
    assert not desk.told().refusals


def test_the_deadline_is_checked_again_at_release() -> None:
    """A request that waited until too little time was left is refused at its release, and the next one is released."""
    desk = Desk()
    desk.core.dispatcher.forecast = FixedForecast(0.0)
    desk.reserved(request_id=name(1000))
    desk.submit(request_id=name(1), remaining_ms=1000)
    desk.submit(request_id=name(2), remaining_ms=60_000)
    assert not desk.told().refusals
    desk.policy.costs._coefficients = (0.5, 0.0, 0.0)
    desk.wait(0.7)
    desk.down("prefill-0", starts=[pb.Start(slot=max(desk.links["prefill-0"][0].slots))])
    desk.wait(0.1)
    (refusal,) = desk.told().refusals
    assert refusal.slot == 2 and refusal.reason == pb.Refusal.REASON_DEADLINE and refusal.estimate_ms >= 1300
    assert desk.placed()[1].request_id == name(2)


WAITS: Final = [{"remaining_ms": 4000}, {"ttft_ms": 4000}]
"""20 tokens of 50 ms and an answer of 200 ms: such a request may wait for 2.8 s."""


def waiting(forecast: FixedForecast, **fields: Any) -> tuple[Desk, int]:
    """Return a desk where a request waits behind a running one, and its slot."""
    desk = Desk()
    desk.core.dispatcher.forecast = forecast
    desk.reserved(request_id=name(1000))
    return desk, desk.submit(request_id=name(1), tokens=20, **fields)


@pytest.mark.parametrize("limit", WAITS)
def test_a_request_that_waits_too_long_is_refused_before_its_deadline(limit: dict[str, int]) -> None:
    """Its client hears a Retry-After, and an estimate above its own limit, while time is left. Resumed requests wait on."""
    desk, late = waiting(FixedForecast(0.05), **limit)
    resumed = desk.submit(request_id=name(2), tokens=20, resumed=True, attempt=2, **limit)
    desk.wait(2.7)
    assert not desk.told().refusals
    desk.wait(0.15)
    (refusal,) = desk.told().refusals
    assert (refusal.slot, refusal.reason) == (late, pb.Refusal.REASON_DEADLINE)
    assert refusal.retry_after_ms > 0 and refusal.estimate_ms >= 4000
    assert " s left after 2.850 s" in refusal.message and "1.000 s of computing" in refusal.message
    desk.wait(1.0)
    assert not desk.told().refusals
    desk.wait(0.2)
    (refusal,) = desk.told().refusals
    assert (refusal.slot, refusal.reason) == (resumed, pb.Refusal.REASON_DEADLINE) and not refusal.estimate_ms
    assert len(desk.core.attempts.deadlines) == 1, "of the running one"


def test_the_estimate_of_a_waiting_request_is_made_anew_before_its_refusal() -> None:
    """Costs that fell meanwhile let it wait for longer; costs that rose are found at the time that was set before."""
    forecast = FixedForecast(0.15)
    desk, slot = waiting(forecast, remaining_ms=4000)
    forecast.token_s = 0.05
    desk.wait(1.0)
    desk.wait(1.7)
    assert not desk.told().refusals
    desk.wait(0.15)
    assert [row.slot for row in desk.told().refusals] == [slot]


@pytest.mark.parametrize("change", ["stale", "probe"])
def test_a_wait_is_not_ended_by_estimates_that_are_to_be_measured(change: str) -> None:
    """Without a recent measurement, and as a probe, a request waits until its deadline."""
    forecast = FixedForecast(0.05)
    desk, slot = waiting(forecast, remaining_ms=4000)
    forecast.is_measured = change != "stale"
    for attempt in desk.core.queue:
        attempt.routing.is_probe = change == "probe"
    desk.wait(3.9)
    assert not desk.told().refusals
    desk.wait(0.2)
    (refusal,) = desk.told().refusals
    assert refusal.slot == slot and not refusal.estimate_ms


def test_a_request_with_hardly_enough_time_is_still_tried() -> None:
    """The time for the answer is not taken from a request that can be placed soon: its placement may be better."""
    desk, slot = waiting(FixedForecast(0.1), remaining_ms=2010)
    desk.wait(0.05)
    desk.down("prefill-0", starts=[pb.Start(slot=max(desk.links["prefill-0"][0].slots))])
    desk.wait(0.01)
    assert not desk.told().refusals and desk.placed()[1].request_id == name(1)
    desk, slot = waiting(FixedForecast(0.1), remaining_ms=2010)
    desk.wait(0.05)
    assert not desk.told().refusals
    desk.wait(0.1)
    assert [row.slot for row in desk.told().refusals] == [slot]


def test_a_request_that_comes_back_late_is_placed_again_and_its_wait_is_bounded() -> None:
    """A replica gives it back after the time when a waiting one is refused: it gets the time of an answer for a new try."""
    desk = Desk(prefills=2)
    desk.core.dispatcher.forecast = FixedForecast(0.05)
    slot = desk.submit(request_id=name(1), tokens=20, remaining_ms=4000)
    decode, submit = desk.placed()
    desk.wait(2.9)
    desk.told()
    desk.down(decode, refusals=[pb.Refusal(slot=submit.slot, reason=pb.Refusal.REASON_KV_FULL)])
    desk.check()
    assert not desk.told().refusals and desk.placed()[1].request_id == name(1)
    for decode in ("decode-0", "decode-1"):
        desk.lose(decode)
    desk.wait(0.15)
    assert not desk.told().refusals
    desk.wait(0.3)
    (refusal,) = desk.told().refusals
    assert (refusal.slot, refusal.reason) == (slot, pb.Refusal.REASON_DEADLINE) and refusal.estimate_ms


def test_charges_of_untouched_prompts_are_refunded_and_others_are_not() -> None:
    """A cancel before the start costs a tenant nothing. A cancel after the start costs the prompt and the output so far."""
    desk = Desk()
    desk.reserved(request_id=name(1), tenant="a")
    (item,) = desk.core.attempts.open
    counters = item.ticket.counters
    assert counters is not None and counters.prefill == 20 and counters.decode == 20
    desk.ask(cancels=[pb.Cancel(slot=item.slot, reason=pb.Cancel.REASON_CLIENT)])
    assert counters.prefill == counters.decode == 0
    desk.reserved(request_id=name(2), tenant="a")
    desk.down("prefill-0", starts=[pb.Start(slot=max(desk.links["prefill-0"][0].slots))])
    (item,) = desk.core.attempts.open
    desk.ask(cancels=[pb.Cancel(slot=item.slot, reason=pb.Cancel.REASON_CLIENT)])
    assert item.ticket.counters is counters and counters.prefill == 20 and counters.decode == 0


def test_shadow_requests_wait_in_the_lowest_priority_class_and_are_evicted_first() -> None:
    """The priority class in their budget is ignored."""
    desk = Desk(queue=2)
    busy(desk, 1)
    desk.submit(request_id=name(5), priority_class=7, shadow=True)
    desk.submit(request_id=name(6), priority_class=0)
    (refusal,) = desk.told().refusals
    assert refusal.evicted and [item.submitted.request_id for item in desk.core.queue] == [name(0), name(6)]


def test_headroom_is_kept_free_unless_the_replica_is_empty() -> None:
    """Reserved blocks of the last report count, or own ones if the report is stale.

    A stale report is never read as full.
    """

    def has_room(state: ReplicaState, blocks: int, permille: int) -> bool:
        choice = DecodeChoice(1, 0.0, random.Random(1))
        request = PlacementRequest("r", (), blocks - 10, 10, kv_headroom_permille=permille)
        return bool(choice.fitting(request, PoolView((), [state]), Match(LocalPrefixIndex(), ())))

    state = ReplicaState("d", block_total=100, block_reserved=80)
    assert has_room(state, 15, 50) and not has_room(state, 15, 100)
    assert not has_room(ReplicaState("d", block_total=100, block_reserved=1), 95, 100)
    assert has_room(ReplicaState("d", block_total=100), 95, 100), "the replica is empty"
    state = ReplicaState("d", block_total=100, block_reserved=100, block_own=10, is_stale=True)
    assert has_room(state, 85, 50)
    assert has_room(ReplicaState("d"), 1000, 100), "its block count is unknown yet"


def test_a_class_with_headroom_waits_where_another_is_placed() -> None:
    """The headroom of a request reaches the policy. That of a resumed request does not."""
    asked: list[PlacementRequest] = []

    class Listening(CostPolicy):
        def place(self, request: PlacementRequest, *rest: Any) -> Any:
            asked.append(request)
            return super().place(request, *rest)

    desk = Desk()
    desk.policy.__class__ = Listening
    for decode in ("decode-0", "decode-1"):
        report = pb.LoadReport(block_total_count=100, block_reserved_count=88, engine_ready=True)
        desk.down(decode, load_report=report)
    desk.submit(request_id=name(1), tokens=20, kv_head_room_permille=100)
    assert asked[-1].kv_headroom_permille == 100 and not desk.up("decode-0").submits
    assert [item.submitted.request_id for item in desk.core.queue] == [name(1)]
    desk.submit(request_id=name(2), tokens=20, kv_head_room_permille=100, resumed=True, attempt=2)
    desk.wait(0.06)
    assert any(one.kv_headroom_permille == 0 for one in asked)
    assert [item.submitted.request_id for item in desk.core.queue] == [name(1)], (
        "the resumed one was released"
    )


def slow_desk() -> Desk:
    """Return a desk at which prefills have just taken 3 s."""
    desk = Desk()
    desk.core.dispatcher.forecast = desk.policy
    for _ in range(100):
        desk.policy.costs.observe(10, 10, 3.0)
    desk.policy._measured_at_s = desk.now_s
    return desk


def submits(desk: Desk) -> list[pb.Submit]:
    """Return the submits that decode got since the last call."""
    return [each for name_ in ("decode-0", "decode-1") for each in desk.up(name_).submits]


def test_estimates_that_refuse_every_request_are_probed() -> None:
    """Prefills were slow, and every deadline is shorter: no further prompt would be measured.

    After a while one runs as a probe.

    Replicas do not get the old estimate, by which they would refuse too. A quick probe resets the estimates.
    """
    desk = slow_desk()
    desk.submit(request_id=name(1), ttft_ms=1000)
    (refusal,) = desk.told().refusals
    assert refusal.reason == pb.Refusal.REASON_DEADLINE and refusal.estimate_ms > 1000
    desk.wait(11)
    desk.submit(request_id=name(2), ttft_ms=1000)
    assert not desk.told().refusals
    (submit,) = submits(desk)
    assert submit.request_id == name(2) and not submit.prefill_estimate_us
    desk.submit(request_id=name(3), ttft_ms=1000)
    assert len(desk.told().refusals) == 1 and not submits(desk), "one probe is enough"
    desk.policy.observe(Measured("prefill-0", Hit(0, 10, 0, 0.01), desk.now_s))
    assert not desk.policy.knows_costs(), "the next request is the probe"
    for _ in range(20):
        desk.policy.costs.observe(10, 10, 0.01)
    assert desk.policy.knows_costs() and desk.policy.costs.estimate_s(10, 10) < 0.05


def test_hopeless_requests_are_refused_without_other_traffic() -> None:
    """A minute of hopeless requests alone, none of which is measured: one in ten seconds runs as a probe, in vain."""
    desk = slow_desk()
    tried, refused = 0, 0
    for number in range(180):
        desk.submit(request_id=name(number), ttft_ms=1000)
        told = desk.told()
        refused += len(told.refusals)
        for submit in submits(desk):
            tried += 1
            desk.ask(
                cancels=[pb.Cancel(slot=slot, reason=pb.Cancel.REASON_CLIENT) for slot in desk.session.slots]
            )
            assert submit.request_id == name(number)
        desk.wait(1 / 3)
    assert 5 <= tried <= 6 and tried + refused == 180
    assert desk.policy.costs.estimate_s(10, 10) > 1, "the estimates are kept"


@pytest.mark.parametrize(("seconds", "is_refuted"), [(2.9, False), (1.6, False), (1.4, True), (0.01, True)])
def test_a_late_measurement_refutes_only_estimates_that_are_far_too_long(
    seconds: float, is_refuted: bool
) -> None:
    """Sparse traffic is measured late too. A chance result does not reset the estimates."""
    desk = slow_desk()
    desk.wait(11)
    desk.policy.observe(Measured("prefill-0", Hit(0, 10, 0, seconds), desk.now_s))
    assert desk.policy.knows_costs() is not is_refuted


def test_a_quicker_replica_refutes_nothing() -> None:
    """Its time is as estimated for that replica, however far from the times of others."""
    desk = Desk(prefills=3)
    policy, draw = desk.policy, random.Random(1)
    factors = {"prefill-0": 1.0, "prefill-1": 1.0, "prefill-2": 0.33}

    def measure(replica: str, tokens: int) -> None:
        seconds = factors[replica] * (0.02 + 0.05 * tokens)
        policy.observe(Measured(replica, Hit(0, tokens, 0, seconds), desk.now_s))

    for _ in range(300):
        desk.now_s += 0.2
        measure(draw.choice(list(factors)), draw.randint(5, 400))
    for _ in range(20):
        desk.now_s += 11
        measure("prefill-2", 100)
        assert policy.knows_costs()


def test_a_prompt_that_decode_ran_refutes_the_estimate_that_would_refuse_it() -> None:
    """Without prefill replicas no other prompt is measured."""
    desk = slow_desk()
    desk.wait(11)
    work = Dispatched("r", "a" * 32, "decode-0", (), 3.0, desk.now_s, desk.now_s + 60, token_count=10)
    desk.policy.observe(work)
    desk.policy.observe(Finished("r", "a" * 32, desk.now_s, Hit(0, 10, 0, 0.0, local_s=0.01)))
    assert not desk.policy.knows_costs()


def test_a_repeated_old_event_does_not_age_the_measurements() -> None:
    """A peer router repeats an event of minutes ago."""
    desk = slow_desk()
    desk.policy.observe(Measured("prefill-0", Hit(0, 10, 0, 3.0), desk.now_s - 300))
    assert desk.policy.may_refuse(desk.now_s)


def test_old_reports_do_not_stop_placement() -> None:
    """A replica reported that it is full, and then nothing for longer than STALE_S. It gets requests all the same."""
    desk = Desk()
    for decode in ("decode-0", "decode-1"):
        report = pb.LoadReport(block_total_count=100, block_reserved_count=100, engine_ready=True)
        desk.down(decode, load_report=report)
    desk.submit(request_id=name(1))
    assert len(desk.core.queue) == 1
    desk.wait(1.3)
    assert len(desk.core.queue) == 0, "decode decides by its own free blocks"


def test_random_classes_weights_and_tenants_leave_nothing_behind() -> None:
    """With any mix of budgets, every request ends and every charge is corrected."""
    desk, draw = Desk(queue=30), random.Random(4)
    for number in range(60):
        desk.submit(
            request_id=name(number),
            priority_class=draw.randrange(12),
            tenant=draw.choice("abc"),
            weight=draw.choice((0.0, 0.5, 3.0)),
            sheddable=draw.random() < 0.4,
            remaining_ms=draw.choice((200, 100_000)),
        )
    for slot in list(desk.session.slots):
        desk.ask(cancels=[pb.Cancel(slot=slot, reason=pb.Cancel.REASON_CLIENT)])
    assert not desk.core.attempts.open and not len(desk.core.queue)


def test_load_reports_hold_the_step_time_of_the_slowest_decode() -> None:
    """The 95th percentile of its last reports. 0 without any, and when they are older than a minute."""
    desk = Desk()
    assert desk.core.load_report().step_p95_us == 0
    for step_us in range(1000, 1020):
        desk.down("decode-0", load_report=pb.LoadReport(step_us=step_us, engine_ready=True))
    desk.down("decode-1", load_report=pb.LoadReport(step_us=500, engine_ready=True))
    desk.down("prefill-0", load_report=pb.LoadReport(step_us=90_000, engine_ready=True))
    assert desk.core.load_report().step_p95_us == 1018
    desk.wait(STEPS_KEPT_S - 1)
    desk.down("decode-0", load_report=pb.LoadReport(step_us=700, engine_ready=True))
    assert desk.core.load_report().step_p95_us == 1018
    desk.wait(2)
    assert desk.core.load_report().step_p95_us == 700
    desk.wait(STEPS_KEPT_S)
    assert desk.core.load_report().step_p95_us == 0
