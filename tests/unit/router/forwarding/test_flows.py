"""A request through the core step by step: each message, and the messages that follow."""

from __future__ import annotations

import pytest

from kvmesh.attach.frames import FrameError
from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.forwarding.rows import US_MAX, as_us
from tests.unit.router.desk import B, Desk, first, frame, with_room


def test_a_request_from_submit_to_finish() -> None:
    """Accepted, placed, started, first token without the handoff, transferred, tokens, finished."""
    desk = Desk()
    slot = desk.submit(explain=True, credit_position=3)
    told = desk.told()
    assert [row.slot for row in told.acceptances] == [slot]
    (placement,) = told.placements
    assert placement.prefill_replica == "prefill-0" and placement.prompt_block_count == 5
    assert [one.replica for one in placement.candidates] == ["prefill-0"]
    decode, submit = desk.placed()
    assert placement.decode_replica == decode and submit.credit_position == 3
    assert 99_000 < submit.budget.remaining_ms < 100_000
    desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)])
    (asked,) = desk.up("prefill-0").submits
    desk.down(
        "prefill-0",
        acceptances=[pb.Acceptance(slot=asked.slot)],
        starts=[pb.Start(slot=asked.slot, queue_us=7)],
    )
    assert [(row.slot, row.queue_us) for row in desk.told().starts] == [(slot, 7)]
    desk.down("prefill-0", first_tokens=[first(asked.slot)])
    told = desk.told()
    assert [(row.slot, row.token_id, row.context_phase_params) for row in told.first_tokens] == [
        (slot, 1, b"")
    ]
    assert desk.policy.local_index.blocks_of("prefill-0") == 5
    desk.down(
        decode, starts=[pb.Start(slot=submit.slot)], transfers=[pb.Transfer(slot=submit.slot, transfer_us=4)]
    )
    assert desk.cancels("prefill-0") == [(asked.slot, pb.Cancel.REASON_TRANSFERRED)]
    told = desk.told()
    assert [row.transfer_us for row in told.transfers] == [4] and not told.starts
    desk.down(decode, frame=frame(submit.slot, 1, 2))
    desk.down(decode, frame=frame(submit.slot, 1, 3))
    rows = desk.told().frame
    assert (list(rows.positions), list(rows.counts)) == ([1, 3], [2, 1]), "a known position is not sent again"
    desk.ask(credit_slots=[slot], credit_positions=[9])
    sent = desk.up(decode)
    assert (list(sent.credit_slots), list(sent.credit_positions)) == ([submit.slot], [9])
    desk.down(
        decode,
        frame=frame(submit.slot, 4, 6),
        finishes=[pb.Finish(slot=submit.slot, end_position=10, reason=pb.Finish.REASON_LENGTH)],
    )
    told = desk.told()
    assert list(told.frame.counts) == [6]
    assert [(row.slot, row.end_position, row.reason) for row in told.finishes] == [
        (slot, 10, pb.Finish.REASON_LENGTH)
    ]
    desk.assert_empty()
    assert desk.ended == ["REASON_LENGTH"]


def test_positions_computed_beyond_the_window_are_forwarded() -> None:
    """Under the frontend's slot, also beside its finish.

    An unknown slot is ignored, columns of unequal length are refused.
    """
    desk = Desk()
    decode, slot = desk.generating()
    desk.told()
    desk.down(decode, computed_slots=[slot, 99], computed_positions=[70, 5])
    told = desk.told()
    assert (list(told.computed_slots), list(told.computed_positions)) == ([desk.slot], [70])
    cut = pb.Finish(slot=slot, end_position=1, reason=pb.Finish.REASON_SLOW_READER)
    desk.down(decode, computed_slots=[slot], computed_positions=[90], finishes=[cut])
    told = desk.told()
    assert list(told.computed_positions) == [90] and len(told.finishes) == 1
    with pytest.raises(FrameError, match="computed columns differ"):
        desk.down(decode, computed_slots=[slot])


@pytest.mark.parametrize(("token_id", "output", "reason"), [(7, 10, "END_TOKEN"), (1, 1, "LENGTH")])
def test_a_first_token_that_ends_the_request_needs_no_decode(token_id: int, output: int, reason: str) -> None:
    """Both replicas are released without a generation, and the finish follows the token."""
    desk = Desk()
    decode, decode_slot, prefill_slot = desk.reserved(output=output)
    desk.down("prefill-0", first_tokens=[first(prefill_slot, token_id)])
    told = desk.told()
    assert len(told.first_tokens) == 1
    assert [(row.end_position, row.reason) for row in told.finishes] == [
        (1, pb.Finish.Reason.Value(f"REASON_{reason}"))
    ]
    assert desk.cancels(decode) == [(decode_slot, pb.Cancel.REASON_COMPLETE)]
    assert desk.cancels("prefill-0") == [(prefill_slot, pb.Cancel.REASON_COMPLETE)]
    desk.assert_empty()


def test_an_answer_that_ended_before_its_first_token_needs_no_decode() -> None:
    """An engine that omits end tokens: prefill's finish ends the attempt, and counts as a success of the replica."""
    desk = Desk()
    decode, decode_slot, prefill_slot = desk.reserved()
    ejection = desk.links["prefill-0"][0].ejection
    ejection.on_failure(desk.now_s, desk.now_s)
    end = pb.Finish(slot=prefill_slot, end_position=0, reason=pb.Finish.REASON_END_TOKEN)
    desk.down("prefill-0", finishes=[end])
    told = desk.told()
    assert [(row.end_position, row.reason) for row in told.finishes] == [(0, pb.Finish.REASON_END_TOKEN)]
    assert not told.first_tokens and not told.failures
    assert desk.cancels(decode) == [(decode_slot, pb.Cancel.REASON_SUPERSEDED)]
    assert ejection.failures == 0
    desk.assert_empty()


def test_decode_is_told_of_a_closed_window_in_every_stage() -> None:
    """Once each: at decode, and before the placement.

    The next flow-control update opens the window, whatever its position.
    """
    desk = Desk(queue=64)
    decode, decode_slot = desk.generating(credit_position=3)
    desk.ask(closed_slots=[1])
    desk.ask(closed_slots=[1])
    assert list(desk.up(decode).closed_slots) == [decode_slot]
    desk.ask(credit_slots=[1], credit_positions=[3])
    message = desk.up(decode)
    assert (list(message.credit_slots), list(message.credit_positions)) == ([decode_slot], [3])
    desk.ask(credit_slots=[1], credit_positions=[3])
    assert not desk.up(decode).credit_slots, "the window is open, and this does not widen it"
    desk.ask(closed_slots=[99])
    waiting = desk.submit(request_id=B)
    for _ in range(2):
        name, submit = desk.placed()
        full = pb.Refusal(slot=submit.slot, reason=pb.Refusal.REASON_QUEUE_FULL)
        desk.down(name, refusals=[full])
    desk.ask(closed_slots=[waiting])
    desk.wait(0.1)
    messages = [message for message in (desk.up("decode-0"), desk.up("decode-1")) if message.submits]
    assert [list(message.closed_slots) for message in messages] == [[messages[0].submits[0].slot]]


def test_without_prefill_decode_runs_the_prompt() -> None:
    """A local decode: one submit. Its start and first token are forwarded, and there is no handoff."""
    desk = Desk(prefills=0)
    slot = desk.submit()
    decode, submit = desk.placed()
    assert submit.phase == pb.PHASE_CONTEXT_AND_GENERATION
    desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)], starts=[pb.Start(slot=submit.slot)])
    desk.down(
        decode, first_tokens=[pb.FirstToken(slot=submit.slot, token_id=1)], frame=frame(submit.slot, 1, 9)
    )
    told = desk.told()
    assert told.placements[0].prefill_replica == ""
    assert len(told.starts) == len(told.first_tokens) == 1 and list(told.frame.positions) == [1]
    assert told.first_tokens[0].slot == slot
    desk.down(decode, finishes=[pb.Finish(slot=submit.slot, end_position=10, reason=pb.Finish.REASON_LENGTH)])
    desk.assert_empty()


def test_prefill_does_not_wait_for_a_decode_with_many_free_blocks() -> None:
    """Both get the attempt at once. The first token may come before decode's acceptance; the handoff follows the submit."""
    desk = Desk()
    with_room(desk)
    desk.submit()
    decode, submit = desk.placed()
    (prefill,) = desk.up("prefill-0").submits
    desk.down("prefill-0", first_tokens=[first(prefill.slot)])
    assert [row.slot for row in desk.up(decode).handoffs] == [submit.slot]
    desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)])
    assert not desk.up("prefill-0").submits, "submitted twice"


@pytest.mark.parametrize("phase", ["submit", "reserved", "handed_over", "generating"])
def test_a_cancel_ends_an_attempt_at_all_replicas_in_every_phase(phase: str) -> None:
    """The reason reaches every replica with a part of the attempt. Nothing is sent to the frontend."""
    desk = Desk()
    getattr(desk, phase)()
    asked = {name for name in desk.links if desk.links[name][0].slots}
    desk.told()
    desk.ask(cancels=[pb.Cancel(slot=desk.slot, reason=pb.Cancel.REASON_CLIENT)])
    for name in ("prefill-0", "decode-0", "decode-1"):
        request = desk.up(name)
        if phase == "submit":
            assert not request.submits and not request.cancels, "an unsent submit is taken back"
        elif name in asked:
            assert [cancel.reason for cancel in request.cancels] == [pb.Cancel.REASON_CLIENT]
    assert desk.told() == pb.AttachResponse()
    desk.assert_empty()


@pytest.mark.parametrize("microseconds", [10**12, 2**64 - 1])
def test_impossible_reports_of_a_prefill_are_limited(microseconds: int) -> None:
    """Counts and time of a first token are limited to possible values, for the cost model and for the frontend alike."""
    desk = Desk()
    _, _, prefill_slot = desk.reserved()
    desk.wait(0.5)
    desk.told()
    liar = first(prefill_slot)
    liar.prefill_us, liar.cached_token_count, liar.computed_token_count = microseconds, 2**32 - 1, 2**32 - 1
    desk.down("prefill-0", first_tokens=[liar])
    (row,) = desk.told().first_tokens
    assert (row.cached_token_count, row.computed_token_count) == (20, 0) and row.prefill_us <= 500_000
    assert desk.policy.measured_total_s <= 0.5
    assert desk.policy.costs.estimate_s(20, 20) < 1.0
    desk.reserved(request_id=B)


def test_times_are_limited_to_the_range_of_the_wire() -> None:
    """A replica's reported wait is bounded, and so is a huge estimate."""
    desk = Desk()
    decode, decode_slot, prefill_slot = desk.reserved()
    desk.told()
    desk.down("prefill-0", starts=[pb.Start(slot=prefill_slot, queue_us=2**64 - 1)])
    desk.down("prefill-0", first_tokens=[first(prefill_slot)])
    desk.down(decode, transfers=[pb.Transfer(slot=decode_slot, transfer_us=2**64 - 1)])
    told = desk.told()
    assert [told.starts[0].queue_us, told.transfers[0].transfer_us] == [US_MAX, US_MAX]
    for seconds, microseconds in ((1e30, US_MAX), (float("inf"), US_MAX), (-1.0, 0), (float("nan"), 0)):
        assert as_us(seconds) == microseconds


def test_frontends_get_a_load_report_each_second() -> None:
    """The load report is the router's heartbeat, also without any other event."""
    desk = Desk()
    desk.told()
    for _ in range(5):
        desk.wait(1.001)
        assert desk.told().HasField("load_report")


@pytest.mark.parametrize("late_s", [0.0, 0.02, 0.05])
def test_a_prompt_that_ran_alone_took_the_time_that_its_replica_reported(late_s: float) -> None:
    """A start may be reported late, or with the first token.

    Only time that the engine spent on earlier prompts is deducted.
    """
    desk = Desk()
    _, _, slot = desk.reserved()
    desk.wait(late_s)
    desk.down("prefill-0", starts=[pb.Start(slot=slot)])
    desk.wait(0.05 - late_s)
    token = first(slot)
    token.prefill_us = 50_000
    desk.down("prefill-0", first_tokens=[token])
    assert desk.policy.measured_total_s == pytest.approx(0.05)
