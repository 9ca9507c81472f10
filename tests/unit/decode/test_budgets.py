"""Admission control of a decode replica: KV headroom, and requests that cannot end in time."""

from __future__ import annotations

import random

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.deadlines import HOP_MARGIN_S
from kvmesh.replica.engine_view import FRESH_S
from kvmesh.triton.port import EngineLoad
from services.decode.limits import DecodeLimits
from services.decode.step_batch import STEP_FRESH_S
from tests.unit.decode.test_core import GENERATION, LOCAL, PROMPT, Replica
from tests.unit.triton.fake_engine import facts
from tests.unit.triton.reader import SlotView

MANY = DecodeLimits(slots_max=1000, coalesce_max_s=0.0)


def refused(view: SlotView) -> pb.Refusal:
    """Return the refusal."""
    assert view.refusal is not None, view
    return view.refusal


def test_headroom_stays_free_beside_a_request_but_not_beside_a_resumed_one() -> None:
    """64 blocks, requests of 16: a class that leaves half free gets 2 of them in, a class without headroom 2 more."""
    replica = Replica(MANY)
    size = {"output": 58}  # 6 + 58 tokens in blocks of 4
    for slot in (1, 2):
        assert replica.submit(slot, GENERATION, headroom_permille=500, **size).is_accepted
    full = refused(replica.submit(3, GENERATION, headroom_permille=500, **size))
    assert full.reason == pb.Refusal.REASON_KV_FULL
    assert full.message == "KV full: 16 blocks needed beside 32 of headroom, 32/64 free"
    assert replica.submit(4, GENERATION, **size).is_accepted
    assert replica.submit(5, GENERATION, headroom_permille=500, resumed=True, **size).is_accepted
    assert refused(replica.submit(6, GENERATION, resumed=True, **size)).reason == pb.Refusal.REASON_KV_FULL
    assert replica.core.slot_table.reservations.free == 0


def test_a_request_that_never_fits_beside_its_headroom_is_invalid() -> None:
    """Waiting would not help. A resumed one is accepted, because it fits without headroom."""
    replica = Replica(MANY)
    never = refused(replica.submit(1, GENERATION, output=58, headroom_permille=800))
    assert never.reason == pb.Refusal.REASON_INVALID and never.field == "token_ids"
    assert never.message == "16 KV blocks are needed beside 52 of headroom; 64 exist"
    wrong = refused(replica.submit(2, GENERATION, headroom_permille=901))
    assert wrong.reason == pb.Refusal.REASON_INVALID and wrong.field == "budget.kv_head_room_permille"
    assert replica.submit(3, GENERATION, output=58, headroom_permille=800, resumed=True).is_accepted


def test_a_full_replica_states_when_enough_is_free() -> None:
    """First the rate is unknown. Then 8 blocks leave each half second: 16 a second, so 8 missing ones take half a second.

    The same holds after an hour in which no block was held.
    """
    replica = Replica(MANY, facts(kv_blocks=64))
    for slot in range(1, 9):
        assert replica.submit(slot, GENERATION, output=26).is_accepted
    assert refused(replica.submit(9, GENERATION, output=26)).retry_after_ms == 0
    replica.pass_time(0.5)
    replica.send(cancels=[pb.Cancel(slot=1)])
    replica.submit(10, GENERATION, output=26)
    for slot in range(11, 51):
        replica.pass_time(0.5)
        replica.send(cancels=[pb.Cancel(slot=slot - 9 if slot < 18 else slot - 8)])
        assert replica.submit(slot, GENERATION, output=26).is_accepted
    wait_ms = refused(replica.submit(100, GENERATION, output=26)).retry_after_ms
    assert 400 <= wait_ms <= 650
    twice_ms = refused(replica.submit(101, GENERATION, output=58)).retry_after_ms
    assert abs(twice_ms - 2 * wait_ms) <= 2
    replica.send(cancels=[pb.Cancel(slot=slot) for slot in range(43, 51)])
    assert replica.is_empty()
    replica.pass_time(3600.0)
    for slot in range(201, 209):
        assert replica.submit(slot, GENERATION, output=26).is_accepted
    idle_ms = refused(replica.submit(209, GENERATION, output=26)).retry_after_ms
    assert 250 <= idle_ms <= wait_ms, "eight were cancelled together; the idle hour does not count"


@pytest.mark.parametrize("seed", range(30))
def test_random_classes_conserve_blocks_and_evict_no_request(seed: int) -> None:
    """A simple twin adds up the accepted requests. Each decision equals its own, and no accepted request is evicted."""
    print(f"seed={seed}")
    rng = random.Random(seed)
    total = rng.choice((48, 64, 100))
    replica = Replica(MANY, facts(kv_blocks=total, max_sequence_tokens=512))
    held, views = dict[int, int](), dict[int, SlotView]()
    outcomes = dict.fromkeys(("taken", "resumed", "full", "never"), 0)
    for slot in range(1, 300):
        output, permille = rng.randrange(1, 200), rng.choice((0, 50, 150, 500, 900))
        resumed = rng.random() < 0.3
        needed = -(-(len(PROMPT) + output) // 4)
        room = 0 if resumed else -(-total * permille // 1000)
        view = replica.submit(slot, GENERATION, output=output, headroom_permille=permille, resumed=resumed)
        fits = needed + room <= total - sum(held.values())
        assert view.is_accepted == fits, (view, needed, room, held)
        if fits:
            held[slot], views[slot] = needed, view
            outcomes["resumed" if resumed else "taken"] += 1
        else:
            reason = refused(view).reason
            is_never = needed + room > total
            assert reason == (pb.Refusal.REASON_INVALID if is_never else pb.Refusal.REASON_KV_FULL)
            outcomes["never" if is_never else "full"] += 1
        while held and rng.random() < 0.4:
            gone = rng.choice(list(held))
            replica.send(cancels=[pb.Cancel(slot=gone)])
            del held[gone], views[gone]
        replica.pass_time(rng.uniform(0, 0.05))
        assert replica.core.slot_table.reservations.reserved == sum(held.values())
        assert not any(view.is_over() for view in views.values()), "an accepted request was ended"
    assert all(outcomes.values()), outcomes


def test_a_stale_report_of_a_full_engine_is_not_full() -> None:
    """Admission counts only reservations. The load report of the engine is passed on while it is fresh."""
    replica = Replica()
    full = EngineLoad("boot-1", 64, 0, sequences_running=9, step_s=3.0, resident_bytes=1 << 40, cold_steps=0)
    replica.core.sink.on_load(full, replica.now_s)
    report = replica.core.load_report(replica.now_s)
    assert (report.block_free_count, report.step_us) == (0, 3_000_000)
    assert report.engine_memory_bytes == 1 << 40
    assert report.HasField("cold_step_total") and report.cold_step_total == 0
    replica.submit(1, GENERATION, output=58)
    replica.pass_time(FRESH_S + 0.1)
    report = replica.core.load_report(replica.now_s)
    assert (report.block_free_count, report.step_us, report.engine_boot_id) == (48, 0, "boot-1")
    assert report.engine_memory_bytes == 0 and not report.HasField("cold_step_total")
    assert replica.submit(2, GENERATION, remaining_ms=1000).is_accepted


# Time.


def test_a_request_without_time_for_a_token_is_refused_with_the_estimate() -> None:
    """The estimate is the prefill that the router expects, and one present step of this engine."""
    replica = Replica(MANY)
    first = refused(replica.submit(1, GENERATION, ttft_ms=300, estimate_s=0.4))
    assert first.reason == pb.Refusal.REASON_DEADLINE and first.estimate_ms == 400
    assert replica.submit(2, GENERATION, remaining_ms=410, estimate_s=0.4).is_accepted, "no step is known yet"
    replica.submit(3, LOCAL, output=100)
    replica.step(5, seconds=0.1)
    second = refused(replica.submit(4, GENERATION, remaining_ms=500, estimate_s=0.4))
    assert second.reason == pb.Refusal.REASON_DEADLINE and 500 <= second.estimate_ms <= 501
    assert replica.submit(5, GENERATION, remaining_ms=410, estimate_s=0.4, output=1).is_accepted
    local = refused(replica.submit(6, LOCAL, remaining_ms=100))
    assert local.reason == pb.Refusal.REASON_DEADLINE and 100 <= local.estimate_ms <= 101
    assert replica.engine.started_total == 1


def test_a_stale_step_refuses_no_request() -> None:
    """The step of an ended batch could never be corrected if it refused all requests."""
    replica = Replica(MANY)
    replica.submit(1, LOCAL, output=100)
    replica.step(3, seconds=1.0)
    assert refused(replica.submit(2, LOCAL, remaining_ms=900)).estimate_ms == 1000
    replica.send(cancels=[pb.Cancel(slot=1)])
    replica.pass_time(STEP_FRESH_S + 0.1)
    assert replica.submit(3, LOCAL, remaining_ms=900).is_accepted


def test_a_handoff_that_comes_too_late_starts_nothing() -> None:
    """The slot ends at its deadline with the tokens that its caller has, and its blocks are free."""
    replica = Replica(MANY)
    replica.submit(1, LOCAL, output=100)
    replica.step(2, seconds=0.1)
    view = replica.submit(2, GENERATION, remaining_ms=905)
    replica.step(8, seconds=0.1)
    calls = replica.engine.started_total
    replica.pass_time(0.05)
    replica.hand_over(2)
    assert view.finish == pb.Finish(slot=2, end_position=1, reason=pb.Finish.REASON_DEADLINE)
    assert replica.engine.started_total == calls and len(replica.engine.live) == 1
    assert "2" not in {str(slot.number) for slot in replica.core.slot_table.slots.values()}


@pytest.mark.parametrize("seed", range(30))
def test_no_call_starts_with_less_time_than_a_token_takes(seed: int) -> None:
    """Random submits and handoffs: at each engine call, one step fits into the remaining time."""
    print(f"seed={seed}")
    rng = random.Random(seed)
    replica = Replica(MANY, facts(kv_blocks=4096))
    replica.submit(1, LOCAL, output=120)
    ends_s, waiting, started, refusals = dict[int, float](), dict[int, SlotView](), 0, 0
    step_s = rng.choice((0.02, 0.1, 0.4))
    for number in range(2, 150):
        if number % 100 == 0:
            replica.submit(number, LOCAL, output=120)  # a request always runs
            continue
        if rng.random() < 0.5:
            replica.step(1, seconds=step_s)
        needs_s = replica.core.generation.fresh_step_s(replica.now_s)
        remaining_ms, phase = rng.randrange(1, 2000), rng.choice((LOCAL, GENERATION))
        estimate_s = rng.choice((0.0, 0.1, 0.5))
        calls = replica.engine.started_total
        ends_s[number] = replica.now_s + remaining_ms / 1000 - HOP_MARGIN_S
        view = replica.submit(number, phase, remaining_ms=remaining_ms, estimate_s=estimate_s, output=4)
        refusals += view.refusal is not None
        if replica.engine.started_total > calls:
            assert remaining_ms / 1000 - HOP_MARGIN_S > max(needs_s, estimate_s)
            started += 1
        elif view.is_accepted:
            waiting[number] = view
        for handed in [one for one in waiting if rng.random() < 0.2]:
            needs_s = replica.core.generation.fresh_step_s(replica.now_s)
            calls = replica.engine.started_total
            if waiting.pop(handed).is_over():
                continue
            replica.hand_over(handed, handoff=f"h{handed}".encode())
            assert (replica.engine.started_total > calls) == (ends_s[handed] - replica.now_s > needs_s)
            started += replica.engine.started_total > calls
    assert started > 20 and refusals > 5, (started, refusals)
