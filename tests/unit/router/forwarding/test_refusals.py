"""Refusals of replicas: the next replica, and the release of the other leg."""

from __future__ import annotations

from kvmesh.attach.v1 import attach_pb2 as pb
from tests.unit.router.desk import B, Desk, first, with_room


def test_a_refused_reservation_is_tried_once_elsewhere_and_then_waits() -> None:
    """The other decode replica is tried at once. If it refuses too, the request waits a little at the head of its class."""
    desk = Desk()
    desk.submit()
    asked = []
    for _ in range(2):
        decode, submit = desk.placed()
        asked.append(decode)
        desk.down(decode, refusals=[pb.Refusal(slot=submit.slot, reason=pb.Refusal.REASON_KV_FULL)])
    assert sorted(asked) == ["decode-0", "decode-1"]
    assert len(desk.core.queue) == 1
    desk.wait(0.04)
    assert not desk.up("decode-0").submits and not desk.up("decode-1").submits
    desk.wait(0.02)
    desk.placed()
    told = desk.told()
    assert [bool(row.decode_replica) for row in told.placements] == [True, False, True, False, True]
    assert not told.refusals and len(told.acceptances) == 1


def test_a_decode_that_refuses_cancels_the_running_prefill() -> None:
    """The prefill is cancelled, and the attempt is placed on the other decode replica."""
    desk = Desk()
    with_room(desk)
    desk.submit()
    decode, submit = desk.placed()
    (prefill,) = desk.up("prefill-0").submits
    desk.down(decode, refusals=[pb.Refusal(slot=submit.slot, reason=pb.Refusal.REASON_KV_FULL)])
    second_decode, _ = desk.placed()
    assert second_decode != decode
    told = desk.up("prefill-0")
    assert [row.slot for row in told.cancels] == [prefill.slot] and len(told.submits) == 1
    assert not desk.told().refusals


def test_a_decode_that_refuses_after_the_first_token_fails_the_attempt() -> None:
    """A token was delivered: the frontend resumes after it, and the handoff is released."""
    desk = Desk()
    with_room(desk)
    desk.submit()
    decode, submit = desk.placed()
    (prefill,) = desk.up("prefill-0").submits
    desk.down("prefill-0", first_tokens=[first(prefill.slot)])
    desk.down(decode, refusals=[pb.Refusal(slot=submit.slot, reason=pb.Refusal.REASON_KV_FULL)])
    (failure,) = desk.told().failures
    assert failure.code == pb.Failure.CODE_HANDOFF_LOST and not failure.untouched
    assert [row.slot for row in desk.up("prefill-0").cancels] == [prefill.slot]


def test_after_a_refusal_for_slots_prefill_waits_for_the_answer_of_decode() -> None:
    """No report has the number of slots. A prompt that was computed before decode refuses costs an attempt."""
    desk = Desk()
    with_room(desk)
    desk.submit()
    decode, submit = desk.placed()
    (prefill,) = desk.up("prefill-0").submits
    desk.down("prefill-0", first_tokens=[first(prefill.slot)])
    desk.down(decode, refusals=[pb.Refusal(slot=submit.slot, reason=pb.Refusal.REASON_QUEUE_FULL)])
    replica = desk.core.replicas[decode]
    for running, is_ample in ((0, False), (32, False), (30, False), (24, True), (30, True)):
        desk.down(
            decode,
            load_report=pb.LoadReport(
                engine_ready=True,
                block_total_count=1000,
                block_free_count=1000,
                running_request_count=running,
            ),
        )
        assert replica.load.state.has_ample_room() == is_ample, running


def test_other_refusals_go_to_the_frontend_and_release_the_other_replica() -> None:
    """Decode's INVALID and prefill's QUEUE_FULL end the attempt with their numbers."""
    desk = Desk()
    slot = desk.submit()
    decode, submit = desk.placed()
    refusal = pb.Refusal(
        slot=submit.slot, reason=pb.Refusal.REASON_INVALID, message="too long", field="token_ids"
    )
    desk.down(decode, refusals=[refusal])
    (told,) = desk.told().refusals
    assert (told.slot, told.reason, told.field) == (slot, pb.Refusal.REASON_INVALID, "token_ids")
    decode, decode_slot, prefill_slot = desk.reserved(request_id=B)
    refusal = pb.Refusal(slot=prefill_slot, reason=pb.Refusal.REASON_QUEUE_FULL, retry_after_ms=70)
    desk.down("prefill-0", refusals=[refusal])
    assert desk.cancels(decode) == [(decode_slot, pb.Cancel.REASON_SUPERSEDED)]
    assert [row.retry_after_ms for row in desk.told().refusals] == [70]
    desk.assert_empty()
