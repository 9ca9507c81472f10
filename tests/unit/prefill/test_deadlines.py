"""Prompts that cannot end in time never reach the engine."""

from __future__ import annotations

import random

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.deadlines import HOP_MARGIN_S
from services.prefill.limits import PrefillLimits
from services.prefill.prefill_rate import FRESH_S
from tests.unit.prefill.test_core import PROMPT, Replica
from tests.unit.triton.fake_engine import facts
from tests.unit.triton.reader import SlotView


def estimate_of(view: SlotView) -> int:
    """Return the estimate in a refusal for lack of time."""
    assert view.refusal is not None and view.refusal.reason == pb.Refusal.REASON_DEADLINE, view
    return view.refusal.estimate_ms


def test_a_prompt_that_takes_longer_than_is_left_is_refused_with_the_estimate() -> None:
    """Both the deadline and that of the first token count. A prompt that just fits is accepted."""
    replica = Replica()
    assert estimate_of(replica.submit(1, remaining_ms=200, estimate_s=0.2)) == 200
    assert estimate_of(replica.submit(2, ttft_ms=200, estimate_s=0.3)) == 300
    assert estimate_of(replica.submit(3, remaining_ms=3, estimate_s=0.0)) == 0, "it has passed"
    assert not replica.engine.started_total
    assert replica.submit(4, remaining_ms=210, estimate_s=0.2).is_started


def test_a_prompt_is_refused_in_the_queue_once_its_time_is_too_short() -> None:
    """The refusal comes once its prefill can no longer end before the deadline. It has the time that the prompt needs."""
    replica = Replica()
    replica.submit(1)
    late = replica.submit(2, ttft_ms=1005, estimate_s=0.4)
    assert late.is_accepted and not late.is_started
    replica.pass_time(0.59)
    assert late.refusal is None
    replica.pass_time(0.02)
    assert estimate_of(late) == 1000
    assert replica.engine.started_total == 1 and len(replica.core.slot_table.slots) == 1


def test_without_an_estimate_the_own_measure_counts_while_it_is_fresh() -> None:
    """An unknown rate refuses nothing: before the first prefill, after a pause, and for much longer prompts."""
    replica = Replica(model=facts(kv_blocks=4096, max_sequence_tokens=4096))
    prompt = PROMPT * 4
    assert replica.submit(1, prompt, remaining_ms=10_000).is_started
    replica.step()  # takes half a second
    assert estimate_of(replica.submit(2, prompt, remaining_ms=400)) == 500
    assert estimate_of(replica.submit(3, prompt * 2, remaining_ms=900)) == 1000
    assert replica.submit(4, prompt * 20, remaining_ms=900).is_started
    replica.cancel(4)
    replica.pass_time(FRESH_S + 0.1)
    assert replica.submit(5, prompt, remaining_ms=400).is_started


@pytest.mark.parametrize("seed", range(40))
def test_no_prompt_starts_with_less_time_than_its_prefill_takes(seed: int) -> None:
    """Random queues: at each start the remaining time covers the estimate. A refusal has the needed time."""
    print(f"seed={seed}")
    rng = random.Random(seed)
    limits = PrefillLimits(queue_max_requests=6, engine_concurrency=rng.choice((1, 2)), detached_s=1.0)
    replica = Replica(limits, facts(kv_blocks=rng.choice((12, 64))))
    ends_s, estimates = dict[int, float](), dict[int, float]()
    views = dict[int, SlotView]()
    outcomes = {"started": 0, "at the door": 0, "in the queue": 0}

    def check() -> None:
        for number, view in list(views.items()):
            if view.is_started:
                slot = replica.core.slot_table.slots.get(ids[number])
                if slot is None:  # it started, and its time was over before the check
                    assert view.finish is not None and not estimates[number], view
                else:
                    left_s = ends_s[number] - slot.called_s
                    assert left_s > estimates[number] - 1e-9, (number, left_s, estimates[number])
                outcomes["started"] += 1
                del views[number]
            elif view.refusal is not None:
                if view.refusal.reason == pb.Refusal.REASON_DEADLINE:
                    assert view.refusal.estimate_ms >= estimates[number] * 1000 - 1e-6
                    assert view.refusal.estimate_ms or not estimates[number]
                    left_s = ends_s[number] - replica.now_s
                    assert left_s <= estimates[number] + 1e-9, "it could have been in time"
                    outcomes["in the queue" if view.is_accepted else "at the door"] += 1
                del views[number]

    ids = dict[int, str]()
    for number in range(1, 200):
        estimate_s = rng.choice((0.0, 0.05, 0.3, 1.0))
        remaining_ms, ttft_ms = rng.randrange(1, 3000), rng.choice((None, rng.randrange(1, 2000)))
        first_ms = min(remaining_ms, ttft_ms or remaining_ms)
        ends_s[number] = replica.now_s + first_ms / 1000 - HOP_MARGIN_S
        # The replica measures too, for prompts without an estimate. The slot has its result.
        ids[number] = f"{number:032x}"
        views[number] = replica.submit(
            number,
            [rng.randrange(64) for _ in range(rng.randrange(1, 40))],
            request_id=ids[number],
            remaining_ms=remaining_ms,
            ttft_ms=ttft_ms,
            estimate_s=estimate_s,
            priority=rng.randrange(3),
        )
        slot = replica.core.slot_table.slots.get(ids[number])
        refusal = views[number].refusal
        if slot is not None:
            estimates[number] = slot.submitted.estimate_s
        elif estimate_s or refusal is None:
            estimates[number] = estimate_s
        else:
            estimates[number] = refusal.estimate_ms / 1000
        assert not estimate_s or estimates[number] == estimate_s
        check()
        action = rng.random()
        if action < 0.4:
            for _ in range(20):  # refusals come when they are due, not at the next event
                replica.pass_time(rng.uniform(0.0, 0.02))
                check()
        elif action < 0.8:
            replica.now_s += rng.choice((0.0, rng.uniform(0.0, 0.3)))  # the timer comes late
            replica.engine.step(replica.now_s, chosen=lambda _: rng.random() < 0.8)
            replica.read()
            check()
            for known in list(replica.session.slots.values()):
                if known.context_phase_params and rng.random() < 0.9:
                    replica.cancel(known.number, pb.Cancel.REASON_COMPLETE)
                    check()
    assert all(outcomes.values()), outcomes
