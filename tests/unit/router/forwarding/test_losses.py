"""Replicas that are lost, replaced or wrong: each attempt ends once, and no other attempt ends with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvmesh.attach.frames import FrameError
from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.forwarding.attempt import Attempt
from services.router.placement.policy import Placement, PlacementRequest, PoolView, Wait
from tests.unit.router.desk import A, B, Desk, frame


@pytest.mark.parametrize("phase", ["handed_over", "generating"])
def test_a_lost_decode_fails_its_attempts(phase: str) -> None:
    """The frontend is told whether an engine had the prompt.

    Prefill is released at once, or after the time for a takeover.
    """
    desk = Desk()
    reached: Callable[[], tuple[Any, ...]] = getattr(desk, phase)
    decode = reached()[0]
    desk.up("prefill-0")
    desk.lose(decode)
    (failure,) = desk.told().failures
    assert (failure.code, failure.replica) == (pb.Failure.CODE_REPLICA_LOST, decode)
    assert not failure.untouched
    if phase == "handed_over":
        assert not desk.cancels("prefill-0"), "a detached stream may be pulling the blocks"
        desk.wait(3.1)
    assert [reason for _, reason in desk.cancels("prefill-0")] == {
        "handed_over": [pb.Cancel.REASON_COMPLETE],
        "generating": [],
    }[phase]
    desk.assert_empty()


def test_a_lost_prefill_fails_attempts_before_their_first_token() -> None:
    """Before the first token the attempt fails. After it decode continues, and reports if blocks are missing."""
    desk = Desk()
    decode, decode_slot, _ = desk.handed_over()
    desk.told()
    desk.lose("prefill-0")
    assert not desk.told().failures
    desk.down(decode, failures=[pb.Failure(slot=decode_slot, code=pb.Failure.CODE_HANDOFF_LOST)])
    (failure,) = desk.told().failures
    assert failure.code == pb.Failure.CODE_HANDOFF_LOST and not failure.untouched
    desk.links["prefill-0"][0].on_attached(desk.links["prefill-0"][1], pb.Hello(), desk.now_s)
    decode, decode_slot, prefill_slot = desk.reserved(request_id=B)
    desk.down("prefill-0", starts=[pb.Start(slot=prefill_slot)])
    desk.lose("prefill-0")
    (failure,) = desk.told().failures
    assert (failure.code, failure.replica, failure.untouched) == (
        pb.Failure.CODE_REPLICA_LOST,
        "prefill-0",
        False,
    )
    assert desk.cancels(decode) == [(decode_slot, pb.Cancel.REASON_SUPERSEDED)]
    desk.assert_empty()


@pytest.mark.parametrize("part", ["finishes", "failures", "refusals"])
def test_an_unknown_enum_value_ends_the_attempt_and_not_the_stream(part: str) -> None:
    """An unknown finish, failure or refusal is forwarded unchanged. The attempt is over and leaves nothing behind."""
    desk = Desk()
    decode, slot = desk.generating()
    rows = {
        "finishes": pb.Finish(slot=slot, end_position=1, reason=99),  # type: ignore[arg-type]
        "failures": pb.Failure(slot=slot, code=99),  # type: ignore[arg-type]
        "refusals": pb.Refusal(slot=slot, reason=99),  # type: ignore[arg-type]
    }
    desk.told()
    desk.down(decode, **{part: [rows[part]]})
    told = desk.told()
    numbers: list[int] = [row.reason for row in told.finishes]
    numbers += [row.reason for row in told.refusals]
    numbers += [row.code for row in told.failures]
    assert numbers == [99]
    assert desk.ended == ["UNKNOWN"]
    desk.assert_empty()


def test_a_bug_with_one_attempt_fails_that_attempt_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Raised by the placement or by the release: the attempt fails with INTERNAL, is logged, and the others are placed."""
    desk = Desk()
    desk.links["decode-1"][0].is_draining = True
    real_place, real_submit = desk.policy.place, desk.core.dispatcher._submit

    def place(request: PlacementRequest, view: PoolView, now_s: float) -> Placement | Wait:
        if request.request_id == A:
            raise ZeroDivisionError
        return real_place(request, view, now_s)

    def submit(attempt: Attempt, slot: int, phase: pb.Phase.ValueType) -> pb.Submit:
        if attempt.submitted.request_id == B:
            raise ValueError
        return real_submit(attempt, slot, phase)

    desk.policy.place = place  # type: ignore[method-assign]
    desk.core.dispatcher._submit = submit  # type: ignore[method-assign]
    desk.submit(A)
    desk.submit(B)
    desk.submit("c" * 32)
    told = desk.told()
    assert [(row.slot, row.code, row.untouched) for row in told.failures] == [
        (1, pb.Failure.CODE_INTERNAL, True),
        (2, pb.Failure.CODE_INTERNAL, True),
    ]
    assert len(caplog.records) == 2
    (submitted,) = desk.up("decode-0").submits
    assert submitted.request_id == "c" * 32


def test_a_gap_in_the_log_fails_the_attempt() -> None:
    """Tokens that are missing, in a frame or at the finish, fail the attempt."""
    for rows in (
        {"frame": frame(1, 2, 1)},
        {"finishes": [pb.Finish(slot=1, end_position=5, reason=pb.Finish.REASON_LENGTH)]},
    ):
        desk = Desk()
        decode, decode_slot = desk.generating()
        assert decode_slot == 1
        desk.down(decode, **rows)
        (failure,) = desk.told().failures
        assert (failure.code, failure.replica) == (pb.Failure.CODE_GAP, decode)
        assert desk.cancels(decode) == [(1, pb.Cancel.REASON_SUPERSEDED)]
        desk.assert_empty()


def test_a_malformed_frame_ends_the_stream() -> None:
    """Columns that disagree raise before anything is forwarded."""
    desk = Desk()
    decode, decode_slot = desk.generating()
    desk.told()
    with pytest.raises(FrameError):
        desk.down(
            decode, frame=pb.StepFrame(slots=[decode_slot], positions=[1], counts=[2], token_ids=b"1234")
        )
    assert desk.told() == pb.AttachResponse()


def test_a_replica_without_lease_keeps_its_streams() -> None:
    """It gets no new requests, and no stream is cut."""
    desk = Desk()
    decode, decode_slot = desk.generating()
    desk.links[decode][0].is_listed = False
    other = "decode-1" if decode == "decode-0" else "decode-0"
    for index in range(4):
        desk.submit(request_id=f"{index:032x}")
        desk.wait(0.01)
    assert not desk.up(decode).submits and desk.up(other).submits
    desk.down(decode, frame=frame(decode_slot, 1, 2))
    assert list(desk.told().frame.counts) == [2]


def test_a_new_boot_takes_the_name_and_the_old_one_finishes_its_attempts() -> None:
    """Two processes have one name for a moment. New requests go to the new one."""
    desk = Desk(prefills=1)
    decode, decode_slot = desk.generating()
    old, old_link = desk.links[decode]
    desk.core.retire_replica(old)
    desk.add(decode, "decode")
    old.on_response(old_link, pb.AttachResponse(frame=frame(decode_slot, 1, 2)), desk.now_s)
    assert list(desk.told().frame.counts) == [2]
    old.on_lost(old_link, "gone", desk.now_s)
    assert [row.code for row in desk.told().failures] == [pb.Failure.CODE_REPLICA_LOST]
    desk.core.remove_replica(old, desk.now_s)
    assert desk.core.replicas[decode] is desk.links[decode][0]
    desk.assert_empty()
