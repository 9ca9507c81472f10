"""Attempts that no engine had: placed on other replicas without a message to their frontend."""

from __future__ import annotations

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from tests.unit.router.desk import Desk, asked_prefill, first, other, with_room


@pytest.mark.parametrize("how", ["lost", "draining", "untouched", "silent"])
@pytest.mark.parametrize("by", ["decode", "prefill"])
def test_an_untouched_attempt_is_rescheduled_without_a_failure(how: str, by: str) -> None:
    """Given back, lost on the way or never answered: placed on other replicas at once, and nothing stays behind."""
    desk = Desk(prefills=2)
    desk.submit()
    decode, submit = desk.placed()
    prefill, prefill_slot = "", 0
    if by == "prefill":
        desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)])
        prefill, prefill_slot = asked_prefill(desk)
    name, slot = (decode, submit.slot) if by == "decode" else (prefill, prefill_slot)
    desk.told()
    if how == "lost":
        desk.lose(name)
    elif how == "draining":
        desk.down(name, refusals=[pb.Refusal(slot=slot, reason=pb.Refusal.REASON_DRAINING)])
    elif how == "untouched":
        failure = pb.Failure(slot=slot, code=pb.Failure.CODE_ENGINE_LOST, untouched=True)
        desk.down(name, failures=[failure])
    else:
        desk.wait(2.9)
        assert not desk.up(name).cancels
        desk.wait(0.2 if by == "decode" else 60.0)
        assert [row.slot for row in desk.up(name).cancels] == [slot]
    if by == "decode":
        _, submit = other(desk, name)
    else:
        decode, submit = desk.placed()
        desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)])
        assert asked_prefill(desk)[0] != name
    assert submit.attempt == 1
    told = desk.told()
    assert [bool(row.decode_replica) for row in told.placements] == [False, True], (
        "into the queue, and out again"
    )
    assert not told.failures and not told.refusals
    desk.ask(cancels=[pb.Cancel(slot=desk.slot, reason=pb.Cancel.REASON_CLIENT)])
    desk.assert_empty()


def test_a_replica_with_an_old_slot_of_the_attempt_fails_the_attempt() -> None:
    """Rescheduled to a replica that has not released the old slot: the frontend gets a lost replica, not SUPERSEDED."""
    desk = Desk()
    desk.submit()
    decode, _ = desk.placed()
    desk.lose(decode)
    second_decode, submit = other(desk, decode)
    desk.down(second_decode, refusals=[pb.Refusal(slot=submit.slot, reason=pb.Refusal.REASON_SUPERSEDED)])
    told = desk.told()
    assert not told.refusals
    assert [(row.code, row.untouched) for row in told.failures] == [(pb.Failure.CODE_REPLICA_LOST, True)]
    desk.assert_empty()


def test_rescheduling_is_bounded() -> None:
    """If every replica gives the attempt back, the frontend gets the refusal and decides."""
    desk = Desk(prefills=2)
    slot = desk.submit()
    for _ in range(4):
        decode, submit = desk.placed()
        desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)])
        name, prefill_slot = asked_prefill(desk)
        refusal = pb.Refusal(slot=prefill_slot, reason=pb.Refusal.REASON_DRAINING)
        desk.down(name, refusals=[refusal])
    (told,) = desk.told().refusals
    assert (told.slot, told.reason) == (slot, pb.Refusal.REASON_DRAINING)
    desk.assert_empty()


def test_a_silent_decode_after_the_first_token_fails_the_attempt() -> None:
    """Decode never accepted the attempt. A token was delivered: the frontend resumes after it."""
    desk = Desk()
    with_room(desk)
    desk.submit()
    decode, _ = desk.placed()
    (prefill,) = desk.up("prefill-0").submits
    desk.down("prefill-0", first_tokens=[first(prefill.slot)])
    desk.told()
    desk.wait(3.1)
    (failure,) = desk.told().failures
    assert (failure.code, failure.replica, failure.untouched) == (pb.Failure.CODE_STALLED, decode, False)
    desk.assert_empty()


@pytest.mark.parametrize("code", [pb.Failure.CODE_HANDOFF_LOST, pb.Failure.CODE_ENGINE_ERROR])
def test_the_next_attempt_avoids_the_replicas_of_the_failed_one(code: pb.Failure.Code.ValueType) -> None:
    """Cached or not. After REMEMBER_S the cache decides again."""
    desk = Desk(prefills=2)
    desk.submit()
    decode, submit = desk.placed()
    desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)])
    prefill, slot = asked_prefill(desk)
    desk.down(prefill, starts=[pb.Start(slot=slot)], first_tokens=[first(slot)])
    if code == pb.Failure.CODE_ENGINE_ERROR:
        desk.down(decode, transfers=[pb.Transfer(slot=submit.slot)])
    desk.down(decode, failures=[pb.Failure(slot=submit.slot, code=code)])
    desk.up("prefill-0"), desk.up("prefill-1")
    desk.wait(9.0)
    desk.submit(attempt=2)
    second_decode, submit = desk.placed()
    assert second_decode != decode
    desk.down(second_decode, acceptances=[pb.Acceptance(slot=submit.slot)])
    other_prefill, _ = asked_prefill(desk)
    assert (other_prefill != prefill) == (code == pb.Failure.CODE_HANDOFF_LOST)


def test_a_request_that_failed_at_all_replicas_is_still_placed() -> None:
    """Replicas with a failed attempt are the last choice, not excluded."""
    desk = Desk(prefills=0)
    asked = []
    for attempt in range(1, 5):
        desk.submit(attempt=attempt)
        decode, submit = desk.placed()
        asked.append(decode)
        failure = pb.Failure(slot=submit.slot, code=pb.Failure.CODE_ENGINE_ERROR)
        desk.down(decode, failures=[failure])
        desk.up(decode)
    assert sorted(asked[:2]) == ["decode-0", "decode-1"]


def test_a_prompt_at_a_busy_prefill_moves_to_a_shorter_queue() -> None:
    """It is rescheduled, and no failure counts against the busy replica."""
    desk = Desk(prefills=2)
    desk.submit()
    decode, submit = desk.placed()
    desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)])
    busy, _ = asked_prefill(desk)
    idle = "prefill-1" if busy == "prefill-0" else "prefill-0"
    for _ in range(20):
        report = pb.LoadReport(engine_ready=True, queued_request_count=3, running_request_count=1)
        desk.down(busy, load_report=report)
        desk.down(idle, load_report=pb.LoadReport(engine_ready=True))
        for name in ("decode-0", "decode-1"):
            for asked in desk.up(name).submits:
                desk.down(name, acceptances=[pb.Acceptance(slot=asked.slot)])
        desk.wait(0.5)
    assert asked_prefill(desk)[0] == idle
    assert not any(replica.ejection.failures for replica, _ in desk.links.values())
