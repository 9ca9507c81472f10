"""What a router says about new requests: it can place them, it is cordoned, it drains and serves again."""

from __future__ import annotations

import random

from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.forwarding.outlier_ejection import EJECT_AFTER
from tests.unit.router.desk import A, B, Desk

READY = pb.LoadReport(engine_ready=True)


def said(desk: Desk) -> pb.LoadReport:
    """Return the load report that the frontend gets at once, within the 50 ms between two reports."""
    desk.told()
    desk.wait(0.06)
    return desk.told().load_report


def test_a_router_can_place_with_a_prefill_and_a_decode_replica() -> None:
    """Each way out of use counts, and each return; the frontend is told at once."""
    desk = Desk()
    desk.core.after_event(desk.now_s)
    assert said(desk).can_place
    for name in ("prefill-0", "decode-0"):
        replica, link = desk.links[name]
        other = desk.links["decode-1"][0]
        other.is_listed = name != "decode-0"
        for field, bad in (("is_draining", True), ("is_listed", False), ("is_retired", True)):
            setattr(replica, field, bad)
            desk.core.after_event(desk.now_s)
            report = said(desk)
            assert report.HasField("can_place") and not report.can_place, (name, field)
            setattr(replica, field, not bad)
            desk.core.after_event(desk.now_s)
            assert said(desk).can_place, (name, field)
        for report in (pb.LoadReport(engine_ready=True, draining=True), pb.LoadReport()):
            desk.down(name, load_report=report)
            assert not said(desk).can_place
            desk.down(name, load_report=READY)
            assert said(desk).can_place
        desk.lose(name)
        assert not said(desk).can_place
        replica.on_attached(link, pb.Hello(), desk.now_s)
        assert said(desk).can_place


def test_an_ejected_pair_cannot_be_placed_on() -> None:
    """Placement still uses it where no other is there, but another pool serves new requests better."""
    desk = Desk()
    replica = desk.links["prefill-0"][0]
    for _ in range(EJECT_AFTER):
        desk.now_s += 0.001
        replica.failed(desk.now_s, desk.now_s, "test")
    desk.core.after_event(desk.now_s)
    assert not said(desk).can_place
    desk.wait(1.1)
    assert desk.core.load_report().can_place, "the time is over: a probe is possible"


def test_a_closed_pool_and_a_cordoned_router_cannot_place() -> None:
    """The snapshot alone decides; requests that come nevertheless are served."""
    desk = Desk()
    for field in ("is_closed", "is_cordoned"):
        setattr(desk.core.readiness, field, True)
        desk.core.check_readiness()
        report = said(desk)
        assert not report.can_place and report.cordoned is (field == "is_cordoned")
        desk.submit()
        assert desk.placed()
        setattr(desk.core.readiness, field, False)
        desk.core.check_readiness()
        assert said(desk).can_place
        desk.ask(cancels=[pb.Cancel(slot=desk.slot, reason=pb.Cancel.REASON_CLIENT)])


def test_a_pool_without_prefill_replicas_needs_none() -> None:
    """Its decode replicas run the prompts."""
    desk = Desk(prefills=0)
    assert not desk.core.load_report().can_place
    desk.core.readiness.needs_prefill = False
    desk.core.check_readiness()
    assert said(desk).can_place


def test_a_drain_by_the_control_plane_ends() -> None:
    """The router refuses new requests, serves takeovers, and takes requests again."""
    desk = Desk()
    desk.core.drain()
    assert desk.core.load_report().draining and not desk.core.load_report().can_place
    desk.submit(A)
    (refusal,) = desk.told().refusals
    assert refusal.reason == pb.Refusal.REASON_DRAINING
    desk.core.undrain()
    assert said(desk).can_place and not desk.core.load_report().draining
    desk.submit(B)
    assert desk.placed()


def test_a_cordoned_replica_gets_nothing_new_and_keeps_what_runs() -> None:
    """By its own load report, also at a router that missed the snapshot. A takeover is still served."""
    desk = Desk(prefills=0, local=100)
    desk.submit(A)
    name, _ = desk.placed()
    replica = desk.links[name][0]
    desk.down(name, load_report=pb.LoadReport(engine_ready=True, cordoned=True))
    for number in range(20):
        desk.submit(f"{number:032x}")
        other, _ = desk.placed()
        assert other != name
        desk.ask(cancels=[pb.Cancel(slot=desk.slot, reason=pb.Cancel.REASON_CLIENT)])
        desk.up(other)
    assert len(replica.slots) == 1
    adopt = pb.Adopt(slot=90, request_id=B, attempt=1, decode_replica=name, credit_position=9)
    desk.ask(adopts=[adopt])
    assert desk.up(name).adopts
    desk.down(name, load_report=READY)
    assert replica.is_placeable()


def test_a_pool_with_all_decode_replicas_cordoned_says_so() -> None:
    """The refusal tells an operator that the replicas are there."""
    desk = Desk()
    for name in ("decode-0", "decode-1"):
        desk.links[name][0].is_draining = True
    desk.submit(A)
    (refusal,) = desk.told().refusals
    assert refusal.reason == pb.Refusal.REASON_NO_REPLICA
    assert "2 of 2 are cordoned or draining" in refusal.message


def test_a_pool_with_held_decode_replicas_says_so() -> None:
    """A replica that warms up is named apart from one that drains."""
    desk = Desk()
    desk.down("decode-0", load_report=pb.LoadReport(engine_ready=True, draining=True, held=True))
    desk.links["decode-1"][0].is_draining = True
    desk.submit(A)
    (refusal,) = desk.told().refusals
    assert refusal.reason == pb.Refusal.REASON_NO_REPLICA
    assert refusal.message == (
        "no decode replica takes new requests: 1 of 2 are cordoned or draining, "
        "1 of 2 are warming up or quarantined"
    )


def test_the_kept_answer_is_that_of_a_fresh_look() -> None:
    """Under random changes of the replicas and of time."""
    chance, desk = random.Random(4), Desk(prefills=2)
    for _ in range(2_000):
        replica, _ = chance.choice(list(desk.links.values()))
        kind = chance.randrange(6)
        if kind == 0:
            replica.is_draining = chance.random() < 0.5
        elif kind == 1:
            replica.is_listed = chance.random() < 0.5
        elif kind == 2:
            desk.down(replica.name, load_report=chance.choice((READY, pb.LoadReport(), READY)))
        elif kind == 3:
            replica.failed(desk.now_s, desk.now_s, "test")
        elif kind == 4:
            desk.core.readiness.is_closed = chance.random() < 0.2
            desk.core.check_readiness()
        else:
            desk.wait(chance.choice((0.01, 0.5)))
        desk.now_s += 0.001
        desk.core.after_event(desk.now_s)
        wanted = not desk.core.readiness.is_closed
        for role in ("prefill", "decode"):
            of_role = [one for one in desk.core.replicas.values() if one.role == role]
            wanted &= any(one.is_placeable() and one.ejection.may_take(desk.now_s) for one in of_role)
        if kind == 5:  # time alone changes the answer at the next report
            desk.core.check_readiness()
            assert desk.core.readiness.can_place == wanted
        elif desk.core.readiness.can_place != wanted:
            ejected = [one for one in desk.core.replicas.values() if one.ejection.is_ejected]
            assert ejected, "only the end of an ejection is seen late"
