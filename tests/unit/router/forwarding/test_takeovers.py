"""Lost frontends, and stream takeovers by others."""

from __future__ import annotations

import pytest

from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb
from tests.unit.router.desk import A, B, Desk, frame


@pytest.mark.parametrize("phase", ["submit", "reserved", "handed_over", "generating"])
def test_a_lost_frontend_detaches_running_attempts_and_cancels_the_rest(phase: str) -> None:
    """Queued work and prefills end at once. A running decode is kept for `detached_s`, then it is cancelled."""
    desk = Desk()
    getattr(desk, phase)()
    for name in desk.links:
        desk.up(name)
    desk.session.on_closed(desk.now_s)
    desk.check()
    if phase in ("submit", "reserved"):
        desk.assert_empty()
        return
    assert desk.core.attempts.detached_count == 1
    (decode,) = [name for name in ("decode-0", "decode-1") if desk.links[name][0].slots]
    desk.down(decode, frame=frame(1, 1, 3))
    desk.wait(2.9)
    assert not desk.cancels(decode)
    desk.wait(0.2)
    assert desk.cancels(decode) == [(1, pb.Cancel.REASON_ABANDONED)]
    assert bool(desk.cancels("prefill-0")) == (phase == "handed_over")
    desk.assert_empty()


def test_a_takeover_of_a_detached_stream_of_this_router() -> None:
    """The adopt goes to decode, the old slot's finish ends the detached stream, and tokens continue at the new slot."""
    desk = Desk()
    decode, old_slot = desk.generating()
    desk.session.on_closed(desk.now_s)
    desk.outbox = DownwardOutbox()
    desk.session = desk.core.open_session(pb.Hello(process_id="f"), desk.outbox, desk.now_s)
    adopt = pb.Adopt(slot=1, request_id=A, attempt=1, position=2, credit_position=9, decode_replica=decode)
    desk.ask(adopts=[adopt])
    (sent,) = desk.up(decode).adopts
    assert (sent.position, sent.credit_position, sent.attempt) == (2, 9, 1) and sent.slot > old_slot
    desk.down(
        decode,
        acceptances=[pb.Acceptance(slot=sent.slot)],
        frame=frame(sent.slot, 2, 3),
        finishes=[pb.Finish(slot=old_slot, end_position=4, reason=pb.Finish.REASON_ADOPTED)],
    )
    told = desk.told()
    assert [row.slot for row in told.acceptances] == [1] and list(told.frame.positions) == [2]
    assert desk.core.attempts.detached_count == 0
    desk.down(decode, finishes=[pb.Finish(slot=sent.slot, end_position=5, reason=pb.Finish.REASON_LENGTH)])
    assert [row.end_position for row in desk.told().finishes] == [5]
    desk.assert_empty()


def test_a_takeover_during_the_transfer_keeps_the_handoff() -> None:
    """The prefill's slot moves to the successor. It is released when decode reports the transfer."""
    desk = Desk()
    decode, old_slot, prefill_slot = desk.handed_over()
    desk.slot += 1
    desk.ask(adopts=[pb.Adopt(slot=desk.slot, request_id=A, attempt=1, position=1, decode_replica=decode)])
    (sent,) = desk.up(decode).adopts
    desk.down(
        decode,
        acceptances=[pb.Acceptance(slot=sent.slot)],
        finishes=[pb.Finish(slot=old_slot, end_position=1, reason=pb.Finish.REASON_ADOPTED)],
    )
    assert [row.reason for row in desk.told().finishes] == [pb.Finish.REASON_ADOPTED]
    assert not desk.cancels("prefill-0")
    desk.down(decode, transfers=[pb.Transfer(slot=sent.slot)])
    assert desk.cancels("prefill-0") == [(prefill_slot, pb.Cancel.REASON_TRANSFERRED)]


def test_a_takeover_that_sees_the_transfer_first_releases_the_old_handoff() -> None:
    """If the successor gets the transfer before the old slot's end, prefill is released all the same."""
    desk = Desk()
    decode, old_slot, prefill_slot = desk.handed_over()
    desk.slot += 1
    desk.ask(adopts=[pb.Adopt(slot=desk.slot, request_id=A, attempt=1, position=1, decode_replica=decode)])
    (sent,) = desk.up(decode).adopts
    desk.down(
        decode,
        acceptances=[pb.Acceptance(slot=sent.slot)],
        transfers=[pb.Transfer(slot=sent.slot)],
        finishes=[pb.Finish(slot=old_slot, end_position=1, reason=pb.Finish.REASON_ADOPTED)],
    )
    assert desk.cancels("prefill-0") == [(prefill_slot, pb.Cancel.REASON_TRANSFERRED)]


def test_an_unsent_takeover_of_a_lost_frontend_is_never_sent() -> None:
    """It would take the slot from a takeover through another router. A takeover on its way is not cancelled."""
    desk = Desk()
    adopts = [
        pb.Adopt(slot=1, request_id=A, attempt=1, decode_replica="decode-0", adoption=3),
        pb.Adopt(slot=2, request_id=B, attempt=1, decode_replica="decode-1"),
    ]
    desk.ask(adopts=adopts)
    (sent,) = desk.up("decode-0").adopts
    assert sent.adoption == 3
    desk.session.on_closed(desk.now_s)
    assert desk.up("decode-0") == desk.up("decode-1") == pb.AttachRequest()
    refusal = pb.Refusal(slot=sent.slot, reason=pb.Refusal.REASON_SUPERSEDED)
    desk.down("decode-0", refusals=[refusal])
    desk.assert_empty()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_takeover_of_a_lower_attempt_does_not_hide_a_higher_one(is_late: bool) -> None:
    """A higher attempt that came before the adopt, or before decode's answer, stays the latest one."""
    desk = Desk()
    for name in ("decode-0", "decode-1"):
        desk.links[name][0].is_draining = is_late
    if is_late:
        desk.slot = 1
        desk.ask(adopts=[pb.Adopt(slot=1, request_id=A, attempt=1, decode_replica="decode-0")])
        (sent,) = desk.up("decode-0").adopts
        desk.links["decode-0"][0].is_draining = False
        desk.submit(attempt=257)
        desk.up("decode-0")
        desk.down("decode-0", acceptances=[pb.Acceptance(slot=sent.slot)])
        assert desk.cancels("decode-0") == [(sent.slot, pb.Cancel.REASON_SUPERSEDED)]
    else:
        desk.submit(attempt=257)
        desk.slot += 1
        desk.ask(adopts=[pb.Adopt(slot=2, request_id=A, attempt=1, decode_replica="decode-0")])
        assert not desk.up("decode-0").adopts and not desk.up("decode-1").adopts
    assert desk.core.attempts.latest[A].submitted.attempt == 257
    assert [row.reason for row in desk.told().refusals] == [pb.Refusal.REASON_SUPERSEDED]


def test_a_takeover_of_an_unknown_request_is_refused() -> None:
    """By the router for an unknown or unreachable replica, by decode for an unknown request."""
    desk = Desk()
    unknown = pb.Refusal.REASON_UNKNOWN_REQUEST
    adopts = [
        pb.Adopt(slot=1, request_id=A, attempt=1, decode_replica="decode-9"),
        pb.Adopt(slot=2, request_id=A, attempt=1, decode_replica="prefill-0"),
        pb.Adopt(slot=3, request_id=A, attempt=1, decode_replica="decode-0"),
        pb.Adopt(slot=4, request_id=B, attempt=1, decode_replica="decode-1"),
    ]
    desk.ask(adopts=adopts)
    # A router that just started knows no replicas yet: the frontend asks again. Decode's own answer would be final.
    no_replica = pb.Refusal.REASON_NO_REPLICA
    assert [(row.slot, row.reason) for row in desk.told().refusals] == [(1, no_replica), (2, no_replica)]
    (sent,) = desk.up("decode-0").adopts
    desk.down("decode-0", refusals=[pb.Refusal(slot=sent.slot, reason=unknown)])
    desk.lose("decode-1")
    assert [(row.slot, row.reason) for row in desk.told().refusals] == [(3, unknown), (4, unknown)]
    desk.assert_empty()


def test_a_takeover_does_not_wait_for_an_unreachable_replica() -> None:
    """A replica that was just lost may be back at once.

    After a failed dial the takeover is refused, and the frontend resumes.
    """
    desk = Desk()
    desk.lose("decode-0")
    adopt = pb.Adopt(slot=1, request_id=A, attempt=1, decode_replica="decode-0")
    desk.ask(adopts=[adopt])
    assert not desk.told().refusals
    desk.lose("decode-0")
    assert [row.slot for row in desk.told().refusals] == [1]
    desk.ask(adopts=[pb.Adopt(slot=2, request_id=A, attempt=1, decode_replica="decode-0")])
    assert [row.reason for row in desk.told().refusals] == [pb.Refusal.REASON_UNKNOWN_REQUEST]
    desk.assert_empty()


@pytest.mark.parametrize("phase", ["submit", "reserved", "handed_over", "generating"])
def test_a_draining_router_can_be_taken_over_once_all_attempts_generate(phase: str) -> None:
    """An attempt that another router takes over must run at its decode replica, with its KV blocks there."""
    desk = Desk()
    assert desk.core.can_be_taken_over()
    getattr(desk, phase)()
    assert desk.core.can_be_taken_over() == (phase == "generating")


def test_a_silent_replica_is_not_asked_for_a_takeover() -> None:
    """Another router lost it and this one will too: its heartbeats are missing here as well."""
    desk = Desk()
    desk.down("decode-0", load_report=pb.LoadReport(engine_ready=True))
    desk.wait(1.9)
    desk.ask(adopts=[pb.Adopt(slot=1, request_id=A, attempt=1, decode_replica="decode-0")])
    assert len(desk.up("decode-0").adopts) == 1
    desk.wait(0.2)
    desk.ask(adopts=[pb.Adopt(slot=2, request_id=B, attempt=1, decode_replica="decode-0")])
    assert [(row.slot, row.reason) for row in desk.told().refusals] == [
        (2, pb.Refusal.REASON_UNKNOWN_REQUEST)
    ]
    assert not desk.up("decode-0").adopts
