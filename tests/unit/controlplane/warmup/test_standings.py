"""Replicas as the hold-back rule sees them: reports come at once, leases are read a while later."""

from __future__ import annotations

from typing import Literal

import pytest

from controlplane.warmup.bounds import ModelBounds
from controlplane.warmup.fleet import Fleet
from controlplane.warmup.jobs import PassResult
from controlplane.warmup.life import ENGINE_LOST_S, WARM_BY_SERVICE_S
from controlplane.warmup.lives import Lives
from controlplane.warmup.packages import Packages
from controlplane.warmup.references import References
from controlplane.warmup.settings import Seeding, WarmUpSettings
from controlplane.warmup.user_queues import UserQueues
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.life_state import LifeState
from kvmesh.membership.member import Member

STATES = {
    "starting": pb.REPLICA_STATE_STARTING,
    "probing": pb.REPLICA_STATE_PROBING,
    "serving": pb.REPLICA_STATE_SERVING,
    "quarantined": pb.REPLICA_STATE_QUARANTINED,
}


def _serves(lease: str, reported: str, *, draining: bool) -> bool:
    fleet = Fleet()
    member = Member(
        process_id="a",
        role="prefill",
        address="a:1",
        boot_id="b",
        model_version="v1",
        block_tokens=4,
        state=lease,
        draining=draining,
        capabilities=("life",),
        engine_boot_id="e",
    )
    fleet.list_members([member])
    fleet.begin(member, pb.ReplicaLife(state=STATES[reported], engine_boot_id="e"), 0.0)
    (standing,) = fleet.standings(0.0)["default", "prefill"]
    return standing.serves


@pytest.mark.parametrize("lease", ["starting", "probing", "serving"])
def test_a_replica_that_reports_service_serves(lease: str) -> None:
    """Its lease still says that it is held. No other replica is released meanwhile."""
    assert _serves(lease, "serving", draining=lease != "serving")


@pytest.mark.parametrize("lease", ["draining", "cordoned", ""])
def test_a_replica_that_leaves_does_not_serve(lease: str) -> None:
    """A drain, a cordon, or a drain of a release that writes no state."""
    assert not _serves(lease, "serving", draining=True)


@pytest.mark.parametrize("reported", ["starting", "probing", "quarantined"])
def test_held_and_quarantined_replicas_do_not_serve(reported: str) -> None:
    """Whatever their leases said before."""
    assert not _serves("serving", reported, draining=False)


def _member(name: str, role: Literal["prefill", "decode"] = "prefill") -> Member:
    return Member(
        process_id=name,
        role=role,
        address="a:1",
        boot_id="b",
        model_version="v1",
        block_tokens=4,
        capabilities=("life",),
        engine_boot_id=f"engine-{name}",
    )


def test_a_replica_in_service_is_cold_until_its_passes_or_its_users_warmed_it() -> None:
    """So is one that is called into service, and one that an earlier leader did not prove.

    A process without a life is warm, and so is an engine that served before.
    """
    fleet = Fleet()
    members = [_member(name) for name in ("adopted", "hurried", "known", "passed", "proved", "stranger")]
    fleet.list_members(members)
    fleet.served.update({"engine-known": None, "engine-adopted": None})
    for member in members[:-1]:
        name = member.process_id
        is_met_later = name in ("hurried", "known")
        report = pb.ReplicaLife(
            state=STATES["probing" if is_met_later else "serving"],
            engine_boot_id=member.engine_boot_id,
            proved=name == "proved",
        )
        life = fleet.begin(member, report, 0.0)
        life.is_hurried = name == "hurried"
        if name == "known":
            life.go(LifeState.SERVING, 0.0)
        if name == "passed":
            life.passes = [PassResult(1.0, 0)]

    def cold(now_s: float) -> list[str]:
        standings = fleet.standings(now_s)["default", "prefill"]
        assert all(each.serves for each in standings)
        return [each.process_id for each in standings if each.is_cold]

    assert cold(WARM_BY_SERVICE_S - 1) == ["adopted", "hurried"]
    assert cold(WARM_BY_SERVICE_S) == ["hurried"], "the time of its service has not begun"


@pytest.mark.parametrize("state", ["probing", "serving"])
def test_a_replica_whose_engine_is_lost_neither_serves_nor_is_held(state: str) -> None:
    """It gives nothing to its pool, and a replica beside it is not held back. A short silence is no loss."""
    lives = _lives()
    lives.on_members([_member("a")], 0.0)

    def standing(now_s: float) -> tuple[bool, bool]:
        (found,) = lives.fleet.standings(now_s)["default", "prefill"]
        return found.serves, found.is_held

    def report(now_s: float, *, is_lost: bool) -> bool:
        """Report, and return whether the replica is a source for others."""
        life = pb.ReplicaLife(state=STATES[state], engine_boot_id="engine-a", engine_lost=is_lost)
        lives.on_report("a", "b", life, now_s)
        known = lives.fleet.lives["a"]
        return known in lives.fleet.serving("default", "prefill", known.key)

    serves, held = state == "serving", state == "probing"
    assert report(1.0, is_lost=False) is serves and standing(1.0) == (serves, held)
    lives.is_due = False
    assert not report(2.0, is_lost=True) and lives.is_due
    assert not report(4.0, is_lost=True)
    assert standing(2.0) == standing(1.9 + ENGINE_LOST_S) == (serves, held)
    assert standing(2.0 + ENGINE_LOST_S) == (False, False)
    assert report(6.0, is_lost=False) is serves and standing(9.0) == (serves, held)


def _lives() -> Lives:
    return Lives(
        WarmUpSettings(seeding=Seeding.NONE),
        References((), {}),
        Packages(lambda: 0.0),
        lambda _: ModelBounds(64, 256, {}),
        lambda _: None,
        lambda _: None,
    )


def test_a_decode_without_prefill_replicas_in_its_pool_is_called() -> None:
    """The decode computes the prompts itself. Beside a prefill that does not serve, the decode cannot help users."""
    for has_prefill in (False, True):
        lives = _lives()
        members = [_member("d", "decode"), _member("e", "decode")]
        lives.on_members([*members, *([_member("p")] if has_prefill else [])], 0.0)
        for name, state in (("d", "starting"), ("e", "starting"), ("p", "quarantined")):
            report = pb.ReplicaLife(state=STATES[state], engine_boot_id=f"engine-{name}")
            lives.on_report(name, "b", report, 0.0)
        lives.step(UserQueues({}, unplaced=frozenset({"default"})), lambda _: (), 1.0)
        hurried = [name for name in ("d", "e") if lives.fleet.lives[name].is_hurried]
        assert len(hurried) == (1 if has_prefill else 2)


@pytest.mark.parametrize("has_decode", [False, True])
def test_users_without_a_decode_replica_do_not_call_a_prefill(has_decode: bool) -> None:
    """They wait at a router that can place none. Only with a decode replica does a second prefill help them."""
    lives = _lives()
    members = [_member("a"), _member("b"), *([_member("d", "decode")] if has_decode else [])]
    lives.on_members(members, 0.0)
    for name, state in (("a", "starting"), ("b", "starting"), ("d", "serving")):
        report = pb.ReplicaLife(state=STATES[state], engine_boot_id=f"engine-{name}")
        lives.on_report(name, "b", report, 0.0)
    lives.step(UserQueues({"default": 0.0}, unplaced=frozenset({"default"})), lambda _: (), 1.0)
    hurried = [name for name in ("a", "b") if lives.fleet.lives[name].is_hurried]
    assert len(hurried) == (2 if has_decode else 1)


def test_a_long_queue_at_the_only_cold_replica_calls_the_next() -> None:
    """The pool has no other one."""
    for queue_s in (0.0, 5.0):
        lives = _lives()
        lives.on_members([_member("a"), _member("b"), _member("d", "decode")], 0.0)
        for name, state in (("a", "serving"), ("b", "starting"), ("d", "serving")):
            report = pb.ReplicaLife(state=STATES[state], engine_boot_id=f"engine-{name}")
            lives.on_report(name, "b", report, 0.0)
        lives.step(UserQueues({"default": 0.0}, {"a": queue_s}), lambda _: (), 1.0)
        assert lives.fleet.lives["b"].is_hurried is (queue_s > 0)
