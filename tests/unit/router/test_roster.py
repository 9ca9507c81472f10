"""The replicas that views have, against a look at each of them."""

from __future__ import annotations

import random

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.roster import STALE_S
from tests.unit.router.desk import Desk


def plain(desk: Desk, role: str) -> list[tuple[str, bool]]:
    """Those of a role that may be sent requests, by asking each, and whether their reports are too old."""
    there = [one for one in desk.relay.replicas.values() if one.role == role and one.is_placeable()]
    trusted = [one for one in there if one.ejection.may_take(desk.now_s)]
    missing = len(there) - len(there) // 2 - len(trusted)
    if trusted and missing > 0:
        ejected = [one for one in there if one not in trusted]
        trusted += sorted(ejected, key=lambda one: one.ejection.until_s or 0.0)[:missing]
    return [(one.name, desk.now_s - one.state.reported_at_s > STALE_S) for one in trusted or there]


@pytest.mark.parametrize("seed", range(6))
def test_views_have_what_a_look_at_each_finds(seed: int) -> None:
    """Streams come and go, members leave and drain, engines report, fail and are trusted again, in any order."""
    rng = random.Random(seed)
    desk = Desk(prefills=4)
    kept = 0
    for _ in range(400):
        desk.now_s += rng.choice((0.0, 0.01, 0.3, 1.0))
        name = rng.choice(list(desk.links))
        replica = desk.links[name][0]
        match rng.randrange(9):
            case 0:
                replica.is_listed = rng.random() < 0.7
            case 1:
                replica.is_draining = rng.random() < 0.3
            case 2 if replica.is_up:
                desk.lose(name)
            case 3 if not replica.is_up:
                replica.on_attached(desk.links[name][1], pb.Hello(), desk.now_s)
            case 4 if not replica.is_up:
                desk.relay.remove_replica(replica, desk.now_s)
                desk.add(name, replica.role)
            case 5:
                replica.failed(desk.now_s, desk.now_s, "test")
            case 6:
                replica.ended_well(desk.now_s)
            case _ if replica.is_up:
                report = pb.LoadReport(
                    engine_ready=rng.random() < 0.8, draining=rng.random() < 0.1, block_total_count=100
                )
                desk.down(name, load_report=report)
        desk.check()
        before = desk.relay.releases.view(desk.now_s)
        view = desk.relay.releases.view(desk.now_s)
        kept += view.prefill is before.prefill
        assert [(one.name, one.is_stale) for one in view.prefill] == plain(desk, "prefill"), seed
        assert [(one.name, one.is_stale) for one in view.decode] == plain(desk, "decode"), seed
    assert kept > 20, "the lists are made anew each time"


def test_a_report_that_grows_old_is_found_without_a_change() -> None:
    """One replica reports for ever, the other once: that is stale when its time is over, and the lists stay the same."""
    desk = Desk(prefills=2)
    report = pb.LoadReport(engine_ready=True, block_total_count=100)
    for name in desk.links:
        desk.down(name, load_report=report)
    first = desk.relay.releases.view(desk.now_s)
    for _ in range(20):
        desk.now_s += 0.1
        desk.down("prefill-0", load_report=report)
        view = desk.relay.releases.view(desk.now_s)
        assert [(one.name, one.is_stale) for one in view.prefill] == plain(desk, "prefill")
        assert view.prefill is first.prefill
    assert view.prefill[1].is_stale
