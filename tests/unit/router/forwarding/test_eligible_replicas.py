"""The kept lists of eligible replicas, against a check of each replica."""

from __future__ import annotations

import random

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.forwarding.eligible_replicas import STALE_S
from services.router.forwarding.outlier_ejection import EJECT_AFTER
from tests.unit.router.desk import Desk


def plain(desk: Desk, role: str) -> list[tuple[str, bool]]:
    """Return the eligible replicas of a role, by a check of each, and whether their reports are stale.

    Without a decode replica that takes handoffs there is no prefill replica.
    """
    there = [one for one in desk.core.replicas.values() if one.role == role and one.is_placeable()]
    trusted = [one for one in there if one.ejection.may_take(desk.now_s)]
    missing = len(there) - len(there) // 2 - len(trusted)
    if trusted and missing > 0:
        ejected = [one for one in there if one not in trusted]
        trusted += sorted(ejected, key=lambda one: one.ejection.until_s or 0.0)[:missing]
    found = trusted or there
    if role == "prefill":
        states = [desk.core.replicas[name].load.state for name, _ in plain(desk, "decode")]
        if states and all(state.is_aggregated for state in states):
            return []
    return [(one.name, desk.now_s - one.load.state.reported_at_s > STALE_S) for one in found]


@pytest.mark.parametrize("seed", range(6))
def test_the_kept_lists_match_a_check_of_each_replica(seed: int) -> None:
    """Streams come and go, members leave and drain, engines report, fail and return, in any order."""
    rng = random.Random(seed)
    desk = Desk(prefills=4)
    kept = 0
    for _ in range(400):
        desk.now_s += rng.choice((0.0, 0.01, 0.3, 1.0))
        name = rng.choice(list(desk.links))
        replica = desk.links[name][0]
        match rng.randrange(10):
            case 0:
                replica.is_listed = rng.random() < 0.7
            case 1:
                replica.is_draining = rng.random() < 0.3
            case 2 if replica.is_up:
                desk.lose(name)
            case 3 if not replica.is_up:
                replica.on_attached(desk.links[name][1], pb.Hello(), desk.now_s)
            case 4 if not replica.is_up:
                desk.core.remove_replica(replica, desk.now_s)
                desk.add(name, replica.role)
            case 5:
                replica.failed(desk.now_s, desk.now_s, "test")
            case 6:
                replica.ended_well(desk.now_s)
            case 7:
                replica.hold(rng.random() < 0.3)
            case _ if replica.is_up:
                is_held = rng.random() < 0.1
                report = pb.LoadReport(
                    engine_ready=rng.random() < 0.8,
                    draining=is_held or rng.random() < 0.1,
                    held=is_held,
                    block_total_count=100,
                    aggregated=rng.random() < 0.6,
                )
                desk.down(name, load_report=report)
        desk.check()
        before = desk.core.dispatcher.view(desk.now_s)
        view = desk.core.dispatcher.view(desk.now_s)
        kept += view.prefill is before.prefill
        assert [(one.name, one.is_stale) for one in view.prefill] == plain(desk, "prefill"), seed
        assert [(one.name, one.is_stale) for one in view.decode] == plain(desk, "decode"), seed
    assert kept > 200, "the lists are rebuilt each time"


@pytest.mark.parametrize("seed", range(6))
def test_lists_are_kept_until_a_probe_begins_or_ends(seed: int) -> None:
    """Requests come, wait for decode's answer, go back and end, while replicas are ejected and probed."""
    rng = random.Random(seed)
    desk = Desk(prefills=4, queue=64)
    desk.policy.prefills._dispatch_ahead_s = 100.0
    full = pb.LoadReport(
        engine_ready=True, block_total_count=1000, block_free_count=200, block_reserved_count=800
    )
    desk.down("decode-0", load_report=full)
    desk.down("decode-1", load_report=full)
    taken: dict[str, list[int]] = {"decode-0": [], "decode-1": []}
    kept = 0
    for number in range(400):
        before = desk.core.dispatcher.view(desk.now_s)
        replica = desk.links[rng.choice(list(desk.links))][0]
        match rng.randrange(8):
            case 0 if not replica.ejection.is_ejected:
                for _ in range(EJECT_AFTER):
                    desk.now_s += 0.001
                    replica.failed(desk.now_s, desk.now_s, "test")
            case 1 if rng.random() < 0.5:
                replica.answered_well(desk.now_s)
            case 2:
                desk.wait(rng.choice((0.1, 0.5, 1.0)))
            case 3 | 4:
                desk.submit(request_id=f"{number + 1:032x}")
            case 5 if taken["decode-0"]:
                at = rng.randrange(len(taken["decode-0"]))
                refusal = pb.Refusal(slot=taken["decode-0"].pop(at), reason=pb.Refusal.REASON_KV_FULL)
                desk.down("decode-0", refusals=[refusal])
            case 6 if taken["decode-1"]:
                at = rng.randrange(len(taken["decode-1"]))
                desk.down("decode-1", acceptances=[pb.Acceptance(slot=taken["decode-1"].pop(at))])
            case _ if desk.slot:
                cancel = pb.Cancel(slot=1 + rng.randrange(desk.slot), reason=pb.Cancel.REASON_CLIENT)
                desk.ask(cancels=[cancel])
        for name in taken:
            taken[name] += [one.slot for one in desk.up(name).submits]
        view = desk.core.dispatcher.view(desk.now_s)
        kept += view.prefill is before.prefill
        assert [(one.name, one.is_stale) for one in view.prefill] == plain(desk, "prefill"), seed
        assert [(one.name, one.is_stale) for one in view.decode] == plain(desk, "decode"), seed
    assert kept > 200, "the lists are rebuilt each time"


def test_a_report_gets_stale_without_a_change() -> None:
    """One replica reports forever, the other once.

    That report is stale after STALE_S, and the lists stay the same objects.
    """
    desk = Desk(prefills=2)
    report = pb.LoadReport(engine_ready=True, block_total_count=100)
    for name in desk.links:
        desk.down(name, load_report=report)
    first = desk.core.dispatcher.view(desk.now_s)
    for _ in range(20):
        desk.now_s += 0.1
        desk.down("prefill-0", load_report=report)
        view = desk.core.dispatcher.view(desk.now_s)
        assert [(one.name, one.is_stale) for one in view.prefill] == plain(desk, "prefill")
        assert view.prefill is first.prefill
    assert view.prefill[1].is_stale
