"""What may wait at the relay, in which order, and for how long."""

from __future__ import annotations

import pytest

from kvmesh import blocks
from kvmesh.attach.frames import FrameError, pack_ids
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.queue_order import AGING, ORDERS
from services.router.queue.queue_delay import QueueDelay
from tests.unit.router.desk import A, Desk


def test_a_higher_attempt_takes_the_place_of_a_lower_one() -> None:
    """The lower one ends with SUPERSEDED wherever it is; equal and lower ones are refused."""
    desk = Desk()
    decode, decode_slot = desk.generating()
    desk.told()
    desk.submit(attempt=2, start_position=1)
    told = desk.told()
    assert [row.reason for row in told.finishes] == [pb.Finish.REASON_SUPERSEDED]
    assert desk.up(decode).cancels[0] == pb.Cancel(slot=decode_slot, reason=pb.Cancel.REASON_SUPERSEDED)
    for attempt in (1, 2):
        desk.submit(attempt=attempt)
        assert [row.reason for row in desk.told().refusals] == [pb.Refusal.REASON_SUPERSEDED]


def test_what_cannot_be_served_is_refused_before_anything_is_held() -> None:
    """Deadline, version, blocks, output, replicas, drain: each has its reason, and no replica hears of it."""
    reasons = pb.Refusal
    desk = Desk()
    for changes, reason, field in (
        ({"remaining_ms": 0}, reasons.REASON_DEADLINE, ""),
        ({"ttft_ms": 0}, reasons.REASON_DEADLINE, ""),
        ({"model_version": "old"}, reasons.REASON_STALE_SNAPSHOT, ""),
        ({"block_tokens": 5, "block_hashes": b"x" * 32}, reasons.REASON_INVALID, "block_tokens"),
        ({"output": 0}, reasons.REASON_INVALID, "budget.max_output_tokens"),
    ):
        desk.submit(**changes)
        (refusal,) = desk.told().refusals
        assert (refusal.reason, refusal.field) == (reason, field), changes
    for name in ("decode-0", "decode-1"):
        desk.links[name][0].is_listed = False
    desk.submit()
    assert [row.reason for row in desk.told().refusals] == [reasons.REASON_NO_REPLICA]
    desk.core.drain()
    desk.submit()
    assert [row.reason for row in desk.told().refusals] == [reasons.REASON_DRAINING]
    assert all(desk.up(name) == pb.AttachRequest() for name in desk.links)
    desk.assert_empty()


def test_who_does_not_read_goes_behind_all_others_of_its_tenant_until_it_reads() -> None:
    """A burst of such requests keeps nobody waiting; one whose window opens again has its place back."""
    desk = Desk(queue=64)
    for name in ("decode-0", "decode-1"):
        desk.lose(name)
    slots = []
    for number in range(6):
        slots.append(desk.submit(request_id=f"{number + 1:032x}", credit_position=5))
        desk.now_s += 0.01

    def order() -> list[int]:
        desk.check()
        return [item.slot for item in desk.core.queue]

    assert order() == slots
    desk.ask(closed_slots=slots[:3])
    assert order() == [*slots[3:], *slots[:3]]
    late = desk.submit(request_id="f" * 32)
    assert order() == [*slots[3:], late, *slots[:3]]
    desk.ask(credit_slots=[slots[1]], credit_positions=[5])
    assert order() == [slots[1], *slots[3:], late, slots[0], slots[2]]
    desk.ask(cancels=[pb.Cancel(slot=slot, reason=pb.Cancel.REASON_CLIENT) for slot in (*slots, late)])
    desk.assert_empty()


def test_waiting_ends_by_deadline_or_by_the_queues_patience() -> None:
    """What is not placed in time is refused; a full queue refuses at once and says when to come again."""
    desk = Desk(queue=3, max_wait_s=1.0)
    for name in ("decode-0", "decode-1"):
        desk.lose(name)
    for request, changes in (("1", {}), ("2", {"remaining_ms": 500}), ("3", {"ttft_ms": 300}), ("4", {})):
        desk.submit(request_id=request * 32, **changes)
    (refusal,) = desk.told().refusals
    assert (refusal.slot, refusal.reason) == (4, pb.Refusal.REASON_QUEUE_FULL) and refusal.retry_after_ms > 0
    seen = []
    for _ in range(12):
        desk.wait(0.1)
        seen += [(row.slot, row.reason) for row in desk.told().refusals]
    assert seen == [
        (3, pb.Refusal.REASON_DEADLINE),
        (2, pb.Refusal.REASON_DEADLINE),
        (1, pb.Refusal.REASON_QUEUE_TIMEOUT),
    ]
    desk.assert_empty()


def test_higher_bands_go_first_and_a_resumed_one_at_the_head_of_its_band() -> None:
    """With one request's room at prefill, the order of release is bands, then first come, resumed ones before."""
    desk = Desk()
    desk.reserved(request_id="0" * 32)
    for name, changes in (("1", {}), ("2", {"priority_class": 6}), ("3", {"resumed": True, "attempt": 2})):
        desk.submit(request_id=name * 32, **changes)
    assert release_all(desk, 3) == "231"


def test_resumed_attempts_go_by_length_and_are_bounded_too() -> None:
    """They go ahead of new ones, whatever their priority; beyond the queue's places they are refused as all others."""
    desk = Desk(queue=2)
    desk.core.dispatcher.forecast = desk.policy
    for name in ("decode-0", "decode-1"):
        desk.lose(name)
    for number in range(8):
        terms = {"tokens": 400 - 40 * number, "priority": 8 - number}
        desk.submit(request_id=f"{number:032x}", resumed=number % 2 == 1, attempt=2, **terms)
    assert [item.slot for item in desk.core.queue] == [4, 2, 1, 3]
    refusals = desk.told().refusals
    assert [row.slot for row in refusals] == [5, 6, 7, 8]
    assert all(row.reason == pb.Refusal.REASON_QUEUE_FULL and row.retry_after_ms for row in refusals)


@pytest.mark.parametrize(("order", "released"), [("shortest", "2314"), ("fifo", "1234")])
def test_a_short_prompt_overtakes_a_long_one_that_waits(order: str, released: str) -> None:
    """Short is what takes little where most of it is in cache. After its time nobody overtakes the long one any more."""
    desk = Desk(order_key=ORDERS[order])
    desk.policy.local_index.store("prefill-0", blocks.chain(pack_ids(range(8000)), 4, "m"))
    desk.reserved(request_id="0" * 32)
    desk.core.dispatcher.forecast = desk.policy
    cold = blocks.pack(blocks.chain(pack_ids(range(4000)), 4, "other"))
    desk.submit(
        request_id="1" * 32, tokens=4000, block_hashes=cold
    )  # 0.2 s by the prior: 0.7 s to be overtaken in
    desk.submit(request_id="2" * 32, tokens=8000)
    desk.wait(0.5)
    desk.submit(request_id="3" * 32)
    desk.wait(0.5)
    desk.submit(request_id="4" * 32)
    assert release_all(desk, 4) == released


def test_a_prompt_that_does_not_fit_goes_when_its_time_has_come() -> None:
    """A short one waits at the replica; the long one is held until its length over AGEING has gone by, and no longer."""
    desk = Desk()
    desk.policy.prefills._dispatch_ahead_s = 0.02
    desk.reserved(request_id="0" * 32)
    desk.submit(request_id="1" * 32, tokens=4000)
    (long,) = [item for item in desk.core.attempts.open if item.submitted.token_count == 4000]
    (short,) = desk.policy.backlog.of("prefill-0")
    assert not short.started_s and short.prefill_s < 0.02
    held_s = (desk.policy.costs.estimate_s(4000, 4000) + short.prefill_s - 0.02) / AGING
    desk.wait(0.9 * held_s)
    assert long.routing.released_s == 0.0
    desk.wait(0.2 * held_s)
    assert long.routing.released_s == desk.now_s


def test_the_drain_is_told_of_what_is_to_be_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt of 404 tokens with 400 in cache 4: in the unit in which those that wait are counted."""
    desk, told = Desk(), []
    desk.core.dispatcher.forecast = desk.policy
    desk.policy.local_index.store("prefill-0", blocks.chain(pack_ids(range(400)), 4, "m"))
    monkeypatch.setattr(QueueDelay, "released", lambda _, tokens, now_s: told.append(tokens))
    desk.submit(tokens=404)
    assert told == [4]


def release_all(desk: Desk, count: int) -> str:
    """Let prefill start one after the other; return the first letters of their names, in that order."""
    order = ""
    for _ in range(count):
        current = max(desk.links["prefill-0"][0].slots)
        desk.down("prefill-0", starts=[pb.Start(slot=current)])
        desk.wait(0.01)
        decode, submit = desk.placed()
        order += submit.request_id[0]
        desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)])
        desk.up("prefill-0")
    return order


def test_slots_must_ascend_within_a_stream() -> None:
    """A repeated slot, or one for two purposes, is a broken protocol."""
    desk = Desk()
    desk.submit()
    adopt = pb.Adopt(slot=1, request_id=A, attempt=1, decode_replica="decode-0")
    with pytest.raises(FrameError):
        desk.ask(adopts=[adopt])
    with pytest.raises(FrameError):
        desk.ask(credit_slots=[1], credit_positions=[])
