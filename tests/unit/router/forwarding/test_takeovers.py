"""Frontends that are lost, and those that take over what ran for them."""

from __future__ import annotations

import pytest

from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb
from tests.unit.router.desk import A, B, Desk, frame


@pytest.mark.parametrize("phase", ["submit", "reserved", "handed_over", "generating"])
def test_a_lost_frontend_orphans_what_runs_and_cancels_the_rest(phase: str) -> None:
    """Queued work and prefills end at once; a running decode lives for the orphan time, then it is cancelled."""
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


def test_an_adoption_takes_over_an_orphan_of_this_router() -> None:
    """The adopt goes down, the old slot's finish ends the orphan, tokens go on at the new one."""
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


def test_an_adoption_while_the_blocks_move_keeps_the_handoff() -> None:
    """The prefill's slot moves to the adopter and is released when decode says that it has the blocks."""
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


def test_an_adoption_that_overtakes_the_transfer_releases_the_old_handoff() -> None:
    """When the adopter hears of the transfer before the old slot's end, prefill is told of it all the same."""
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


def test_an_adopt_that_was_not_sent_when_its_frontend_is_lost_is_never_sent() -> None:
    """It would take the slot from whoever adopts through another router. One on its way is not cancelled."""
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
def test_an_adoption_of_a_lower_attempt_does_not_hide_a_higher_one(is_late: bool) -> None:
    """Whether the higher attempt came before the adopt or before decode's answer: it stays the known one."""
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


def test_an_adoption_nobody_knows_is_refused() -> None:
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
    # A router that just started knows nobody yet: its frontend asks again, where decode's own answer would end the matter.
    no_replica = pb.Refusal.REASON_NO_REPLICA
    assert [(row.slot, row.reason) for row in desk.told().refusals] == [(1, no_replica), (2, no_replica)]
    (sent,) = desk.up("decode-0").adopts
    desk.down("decode-0", refusals=[pb.Refusal(slot=sent.slot, reason=unknown)])
    desk.lose("decode-1")
    assert [(row.slot, row.reason) for row in desk.told().refusals] == [(3, unknown), (4, unknown)]
    desk.assert_empty()


def test_a_replica_that_could_not_be_reached_is_not_waited_for_by_an_adopt() -> None:
    """Lost just now it may be back at once; tried in vain, it is refused, and the frontend resumes elsewhere."""
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
def test_a_draining_router_can_be_taken_over_when_everything_generates(phase: str) -> None:
    """What is adopted through another router must run at its decode replica, with its blocks there."""
    desk = Desk()
    assert desk.core.can_be_taken_over()
    getattr(desk, phase)()
    assert desk.core.can_be_taken_over() == (phase == "generating")


def test_a_replica_that_has_gone_silent_is_not_asked_for_what_ran_there() -> None:
    """Another router lost it and this one will: its heartbeats are missing here too."""
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
