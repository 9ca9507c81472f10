"""Warm-up and probes at a decode replica: a lane of their own beside users."""

from __future__ import annotations

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.replica.control_lane import WAITING_MAX
from services.decode.limits import DecodeLimits
from services.decode.slot import DecodeState
from tests.unit.decode.test_core import GENERATION, LOCAL, PROMPT, Replica
from tests.unit.triton.fake_engine import expected, facts
from tests.unit.triton.reader import SlotView, submit

WARM_UP, PROBE = budget_pb2.PURPOSE_WARM_UP, budget_pb2.PURPOSE_PROBE
LIMITS = DecodeLimits(slots_max=8, detached_s=3.0, coalesce_max_s=0.0)


def started(*views: SlotView) -> list[bool]:
    """Return which slots have started."""
    return [view.is_started for view in views]


def test_full_slots_of_users_refuse_no_control_call_and_the_reverse() -> None:
    """Two control calls run beside eight users, whichever came first; a third waits. No report of users counts them."""
    replica = Replica(LIMITS, facts(kv_blocks=400))
    control = [replica.submit(slot, LOCAL, purpose=PROBE) for slot in (1, 2)]
    users = [replica.submit(slot, LOCAL) for slot in range(3, 11)]
    third = replica.submit(11, LOCAL, purpose=WARM_UP)
    assert started(*control, *users, third) == [True] * 10 + [False] and third.is_accepted
    refused = replica.submit(12, LOCAL).refusal
    assert refused is not None and refused.message == "slots full: 8/8"
    load = replica.core.load_report(replica.now_s)
    assert (load.queued_request_count, load.running_request_count) == (0, 8)
    assert load.block_reserved_count == 10 * 4
    assert replica.core.live_request_count() == 11
    replica.step(8)
    assert started(third) == [True]
    replica.step(8)
    assert third.ids == expected(PROMPT, 8, -1)
    assert all(view.finish is not None for view in (*control, *users, third))
    assert replica.core.generation.token_total == 8 * 8
    assert not len(replica.core.slot_table.lane) and len(replica.core.slot_table.finished) == 8


def test_without_users_a_batch_may_have_every_slot() -> None:
    """Batch warm-up submits as many requests at once as the engine runs. A user who comes later is not refused."""
    replica = Replica(LIMITS, facts(kv_blocks=200))
    rows = [submit(slot, PROMPT, LOCAL, output=2, purpose=WARM_UP) for slot in range(1, 10)]
    views = [replica.reader.open(row.slot, 0) for row in rows]
    replica.send(submits=rows)
    assert started(*views) == [True] * 8 + [False]
    user = replica.submit(10, LOCAL)
    assert started(user) == [True]
    replica.step(2)
    assert started(views[8]) == [True]


def test_control_calls_hold_a_quarter_of_the_blocks_at_most() -> None:
    """A local one waits for blocks. One with a handoff is refused, because its source would hold the handoff meanwhile."""
    replica = Replica(LIMITS, facts(kv_blocks=32))
    one, two = (replica.submit(slot, GENERATION, purpose=WARM_UP) for slot in (1, 2))
    assert one.is_accepted and two.is_accepted
    refused = replica.submit(3, GENERATION, purpose=WARM_UP).refusal
    assert refused is not None and refused.reason == pb.Refusal.REASON_KV_FULL
    local = replica.submit(4, LOCAL, purpose=WARM_UP)
    users = [replica.submit(slot, LOCAL) for slot in range(5, 11)]
    assert started(local, *users) == [False] + [True] * 6, "24 of 32 blocks are the users'"
    replica.send(cancels=[pb.Cancel(slot=1, reason=pb.Cancel.REASON_CLIENT)])
    assert started(local) == [True]


def test_a_seed_of_decode_waits_for_its_handoff_and_then_for_its_turn() -> None:
    """A user who arrives starts before a seed that waits for its turn. Neither a takeover nor a log is kept of a seed."""
    replica = Replica(DecodeLimits(slots_max=1, detached_s=3.0, coalesce_max_s=0.0))
    first, second = (replica.submit(slot, GENERATION, output=1, purpose=WARM_UP) for slot in (1, 2))
    for slot in (1, 2):
        replica.hand_over(slot, handoff=f"h{slot}".encode())
    assert started(first, second) == [True, False]
    user = replica.submit(3, LOCAL)
    assert started(user) == [True]
    replica.step()
    assert first.finish is not None and first.finish.end_position == 1 and first.is_transferred
    assert started(second) == [True]
    replica.step()
    assert second.finish is not None
    assert replica.core.slot_table.held_count() == replica.core.slot_table.user_count() == 1


def test_a_full_lane_refuses() -> None:
    """WAITING_MAX slots wait at most."""
    replica = Replica(DecodeLimits(slots_max=1), facts(kv_blocks=4096))
    for slot in range(1, WAITING_MAX + 2):
        assert replica.submit(slot, LOCAL, purpose=WARM_UP).refusal is None
    refused = replica.submit(WAITING_MAX + 2, LOCAL, purpose=WARM_UP).refusal
    assert refused is not None and refused.reason == pb.Refusal.REASON_QUEUE_FULL
    assert started(replica.submit(WAITING_MAX + 3, LOCAL)) == [True]


@pytest.mark.parametrize("state", [DecodeState.QUEUED, DecodeState.PENDING, DecodeState.RUNNING])
@pytest.mark.parametrize("end", ["cancel", "stream", "deadline", "engine restarted", "drain"])
def test_every_end_of_a_control_call_frees_everything(state: DecodeState, end: str) -> None:
    """No block, slot or engine call is left. A lost stream leaves nothing to take over. A running call survives a drain."""
    replica = Replica(DecodeLimits(slots_max=1, detached_s=3.0))
    if state is DecodeState.QUEUED:
        replica.submit(1, LOCAL, purpose=WARM_UP)
    view = replica.submit(
        2, GENERATION if state is DecodeState.PENDING else LOCAL, purpose=WARM_UP, remaining_ms=2_000
    )
    (slot,) = [one for number, one in replica.session.slots.items() if number == 2]
    assert slot.state is state
    if end == "cancel":
        replica.send(cancels=[pb.Cancel(slot=2, reason=pb.Cancel.REASON_CLIENT)])
    elif end == "stream":
        replica.session.on_closed(replica.now_s)
    elif end == "deadline":
        replica.pass_time(2.5)
    elif end == "engine restarted":
        replica.engine.crash("boot-2", replica.now_s)
    else:
        replica.core.drain()
        replica.pass_time(0.0)
    replica.core.assert_consistent()
    if end != "stream":
        replica.read()
    is_over = end in ("cancel", "stream") or view.is_over()
    assert is_over == (state is not DecodeState.RUNNING or end != "drain")
    replica.step(20)
    assert replica.core.is_idle() and not replica.engine.live
    assert not replica.core.slot_table.slots and not replica.core.slot_table.reservations.reserved


def test_no_stream_takes_a_control_call_over() -> None:
    """A takeover is for users."""
    replica = Replica(LIMITS)
    replica.submit(1, LOCAL, purpose=WARM_UP, request_id="ab" * 16)
    replica.reader.open(2, 0)
    replica.send(adopts=[pb.Adopt(slot=2, request_id="ab" * 16, attempt=1, credit_position=9)])
    refused = replica.reader.slots[2].refusal
    assert refused is not None and refused.reason == pb.Refusal.REASON_UNKNOWN_REQUEST


def test_control_calls_neither_measure_a_step_nor_a_rate() -> None:
    """Cold steps of a warm-up must not refuse users' deadlines, nor their drain tell users when to retry."""
    replica = Replica(LIMITS)
    replica.submit(1, LOCAL, output=6, purpose=WARM_UP)
    replica.step(8, seconds=0.4)
    table = replica.core.slot_table
    assert not replica.core.generation.step_batch.step_s
    assert table.freed_slots.per_s(replica.now_s) is None and table.freed_blocks.per_s(replica.now_s) is None
    replica.submit(2, LOCAL, output=6)
    replica.step(8, seconds=0.02)
    assert replica.core.generation.step_batch.step_s == pytest.approx(0.02, rel=0.1)


def test_cached_blocks_are_those_of_the_present_boot() -> None:
    """0 from the restart of the engine until its first events."""
    replica = Replica(LIMITS)
    replica.core.set_cached_blocks("boot-1", 7)
    assert replica.core.cached_block_count() == 7
    assert replica.core.load_report(replica.now_s).cached_block_count == 7
    replica.engine.crash("boot-2", replica.now_s)
    assert replica.core.cached_block_count() == 0
