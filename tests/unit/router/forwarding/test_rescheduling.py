"""Attempts that no engine had: placed again without a word to their frontend."""

from __future__ import annotations

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from tests.unit.router.desk import Desk, asked_prefill, first, other, with_room


@pytest.mark.parametrize("how", ["lost", "draining", "untouched", "silent"])
@pytest.mark.parametrize("by", ["decode", "prefill"])
def test_what_no_engine_had_goes_elsewhere_without_a_word_to_its_frontend(how: str, by: str) -> None:
    """Given back, lost on the way or never answered: placed on the other replicas at once, and nothing stays behind."""
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
        "back in the queue, and out"
    )
    assert not told.failures and not told.refusals
    desk.ask(cancels=[pb.Cancel(slot=desk.slot, reason=pb.Cancel.REASON_CLIENT)])
    desk.assert_empty()


def test_a_replica_that_still_holds_what_was_taken_from_it_costs_an_attempt_and_not_the_request() -> None:
    """Placed again where it had been: the old slot is not given up yet. The frontend hears of a loss, not of a rival."""
    desk = Desk()
    desk.submit()
    decode, _ = desk.placed()
    desk.lose(decode)
    reschedule, submit = other(desk, decode)
    desk.down(reschedule, refusals=[pb.Refusal(slot=submit.slot, reason=pb.Refusal.REASON_SUPERSEDED)])
    told = desk.told()
    assert not told.refusals
    assert [(row.code, row.untouched) for row in told.failures] == [(pb.Failure.CODE_REPLICA_LOST, True)]
    desk.assert_empty()


def test_placing_again_ends() -> None:
    """A mesh that gives everything back is told on: the frontend decides."""
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


def test_a_silent_decode_behind_the_first_token_fails_the_attempt() -> None:
    """It never said that it took the attempt; a token is out: the frontend resumes behind it."""
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
def test_the_next_attempt_leaves_the_replicas_of_the_failed_one(code: pb.Failure.Code.ValueType) -> None:
    """Whatever is cached there; one attempt later than the memory lasts, the cache counts again."""
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
    reschedule, submit = desk.placed()
    assert reschedule != decode
    desk.down(reschedule, acceptances=[pb.Acceptance(slot=submit.slot)])
    other_prefill, _ = asked_prefill(desk)
    assert (other_prefill != prefill) == (code == pb.Failure.CODE_HANDOFF_LOST)


def test_a_request_that_failed_everywhere_is_placed_all_the_same() -> None:
    """What failed is the last choice, and a choice."""
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


def test_a_prompt_that_waits_at_a_busy_prefill_goes_where_the_queue_is_shorter() -> None:
    """It is placed again without a word against the one that works."""
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
