"""The view follows the leases, but not those of a Redis that has just lost all of them."""

from __future__ import annotations

import random

import msgspec

from kvmesh.membership.member import LEASE_S, RENEW_S, Member
from kvmesh.membership.membership import POLL_S
from kvmesh.membership.view import MISSING_S, View


def member(name: str, boot_id: str = "b1") -> Member:
    return Member(
        process_id=name,
        role="decode",
        address="127.0.0.1:1",
        boot_id=boot_id,
        model_version="m",
        block_tokens=32,
    )


def test_a_member_without_lease_is_gone_after_two_polls() -> None:
    """A single expired lease counts once a second poll, later than any renewal, misses it too."""
    view = View()
    assert view.take([member("a"), member("b")], 0.0)
    assert not view.take([member("b"), member("a")], 1.0)
    assert not view.take([member("b")], 2.0)
    assert not view.take([member("b")], 2.0 + MISSING_S - 0.1), (
        "polls may be close together: messages of the channel cause them"
    )
    assert view.take([member("b")], 2.0 + MISSING_S)
    assert set(view.members) == {"b"}
    view.take([member("a"), member("b")], 10.0)
    assert not view.take([member("b")], 11.0)
    assert not view.take([member("a"), member("b")], 12.0)
    assert not view.take([member("b")], 13.0), "counted from the first poll that missed it again"


def test_a_flushed_redis_removes_no_member() -> None:
    """After a flush the first polls find only some renewed leases. MISSING_S later all live members have renewed."""
    names = ["a", "b", "c"]
    for seed in range(200):
        rng = random.Random(seed)
        view = View()
        view.take([member(name) for name in names], 0.0)
        flushed_s = 10.0 + rng.random()
        renewed_s = {name: flushed_s + rng.random() * RENEW_S for name in names}
        now_s = 10.0
        while now_s < 20.0:
            back = [name for name in names if now_s < flushed_s or now_s >= renewed_s[name]]
            assert not view.take([member(name) for name in back], now_s), f"seed={seed} at {now_s}"
            now_s += rng.random() * POLL_S


def test_a_member_that_leaves_is_removed_at_once() -> None:
    """A member that left is removed at the next poll, even while removals are suspended. Its successor stays."""
    view = View()
    view.take([member("a"), member("b")], 0.0)
    view.leave("unknown")
    view.leave("b1")  # the boot id of both: only the missing member is removed
    assert view.take([member("b")], 0.1)
    assert set(view.members) == {"b"}
    view.take([member("a", "a1"), member("b", "b2")], 1.0)
    view.suspend_removals(1.0)
    view.leave("a1")
    assert not view.take([member("a", "a1"), member("b", "b2")], 1.1), "a poll that was in progress"
    assert view.take([member("b", "b2")], 1.2)
    view.take([member("a", "a2"), member("b", "b2")], 2.0)
    assert not view.take([member("b", "b2")], 2.1), "another process of that name"


def test_a_redis_that_came_back_empty_removes_no_member() -> None:
    """After an outage the last view stays for LEASE_S, and new members are added meanwhile."""
    view = View()
    view.take([member("a"), member("b")], 0.0)
    view.suspend_removals(10.0)
    assert not view.take([], 10.5)
    assert view.take([member("b", "b2")], 11.0)
    assert view.members["b"].boot_id == "b2"
    assert set(view.members) == {"a", "b"}
    assert view.take([member("b", "b2")], 10.0 + LEASE_S)
    assert set(view.members) == {"b"}


def test_a_loss_of_all_members_counts_only_after_a_lease_time() -> None:
    """A flush of Redis looks like the end of all members. If they really ended, the view is empty 3 s later."""
    view = View()
    view.take([member("a"), member("b")], 0.0)
    assert not view.take([], 1.0)
    assert set(view.members) == {"a", "b"}
    assert not view.take([], 1.0 + LEASE_S - 0.1)
    assert view.take([], 1.0 + LEASE_S)
    assert not view.members


def test_a_lease_of_a_newer_release_can_be_read() -> None:
    """Protocols only grow: unknown keys are ignored."""
    data = msgspec.json.decode(msgspec.json.encode(member("a")))
    data["invented_later"] = 1
    assert msgspec.json.decode(msgspec.json.encode(data), type=Member) == member("a")
