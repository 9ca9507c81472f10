"""The router's queue: which requests may wait, in which order, and how long."""

from __future__ import annotations

import pytest

from kvmesh import blocks
from kvmesh.attach.frames import FrameError, pack_ids
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.queue_order import AGING, ORDERS
from services.router.queue.queue_delay import QueueDelay
from tests.unit.router.desk import A, Desk


def test_a_higher_attempt_supersedes_a_lower_one() -> None:
    """The lower one ends with SUPERSEDED at every stage. Equal and lower ones are refused."""
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


def test_requests_that_cannot_be_served_are_refused_before_any_reservation() -> None:
    """Deadline, version, blocks, output, replicas, drain: each has its reason, and no replica gets a message."""
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


def test_a_request_with_a_closed_window_goes_behind_all_others_of_its_tenant() -> None:
    """A burst of such requests delays no other. A request with a reopened window has its order back."""
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


def test_waiting_ends_at_the_deadline_or_at_the_longest_wait() -> None:
    """A request that is not placed in time is refused. A full queue refuses at once, with a Retry-After."""
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


def test_higher_classes_go_first_and_resumed_requests_first_in_their_class() -> None:
    """With one request at prefill at a time, the release order is: class, resumed ones, then first come, first served."""
    desk = Desk()
    desk.reserved(request_id="0" * 32)
    for name, changes in (("1", {}), ("2", {"priority_class": 6}), ("3", {"resumed": True, "attempt": 2})):
        desk.submit(request_id=name * 32, **changes)
    assert release_all(desk, 3) == "231"


def test_resumed_attempts_go_by_length_and_are_bounded_too() -> None:
    """They go before new ones, whatever their priority. Beyond the queue's bound they are refused as all others."""
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
    """Short: little to compute at the replica with the longest cached prefix.

    After its time no prompt overtakes the long one.
    """
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


def test_a_long_prompt_is_released_once_it_has_aged() -> None:
    """A short one waits at the replica. The long one is held for its length over AGEING, and no longer."""
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


def test_the_queue_delay_counts_the_tokens_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 404 tokens with 400 in cache counts 4, in the unit of the waiting work."""
    desk, told = Desk(), []
    desk.core.dispatcher.forecast = desk.policy
    desk.policy.local_index.store("prefill-0", blocks.chain(pack_ids(range(400)), 4, "m"))
    monkeypatch.setattr(QueueDelay, "released", lambda _, tokens, now_s: told.append(tokens))
    desk.submit(tokens=404)
    assert told == [4]


def release_all(desk: Desk, count: int) -> str:
    """Let prefill start one request after the other. Return the first letters of their names in that order."""
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
    """A repeated slot, or one for two purposes, breaks the protocol."""
    desk = Desk()
    desk.submit()
    adopt = pb.Adopt(slot=1, request_id=A, attempt=1, decode_replica="decode-0")
    with pytest.raises(FrameError):
        desk.ask(adopts=[adopt])
    with pytest.raises(FrameError):
        desk.ask(credit_slots=[1], credit_positions=[])


def test_shadow_traffic_goes_behind_every_class_of_users() -> None:
    """Also behind the lowest class, and class 0 counts it in metrics."""
    desk = Desk()
    desk.reserved(request_id="0" * 32)
    desk.submit(request_id="1" * 32, shadow=True, tenant="shadow", weight=1000.0, priority_class=0)
    desk.submit(request_id="2" * 32, tenant="late", weight=0.1, priority_class=0)
    assert {each.submitted.precedence.priority_class for each in desk.core.queue} == {0}
    assert release_all(desk, 2) == "21"
    assert desk.core.queue.released_totals[0] == 2 and not desk.core.queue.released_totals[7]


def test_the_longest_wait_is_that_of_a_user() -> None:
    """The control plane hears of users without a replica. Sheddable and shadow requests do not count."""
    desk = Desk()
    for name in ("decode-0", "decode-1"):
        desk.lose(name)
    assert desk.core.longest_wait_us(desk.now_s) == 0
    desk.submit(sheddable=True)
    desk.submit(request_id="d" * 32, shadow=True)
    desk.now_s += 1.0
    assert desk.core.longest_wait_us(desk.now_s) == 0
    slot = desk.submit(request_id="b" * 32)
    desk.now_s += 2.0
    desk.submit(request_id="c" * 32)
    assert desk.core.longest_wait_us(desk.now_s) == 2_000_000
    desk.ask(cancels=[pb.Cancel(slot=slot, reason=pb.Cancel.REASON_CLIENT)])
    assert desk.core.longest_wait_us(desk.now_s) == 0
