"""The view of the mesh believes in leases, but not in a Redis that just forgot everything."""

from __future__ import annotations

import msgspec

from kvmesh.membership import LEASE_S, Member, View


def member(name: str, boot_id: str = "b1") -> Member:
    return Member(
        process_id=name,
        role="decode",
        address="127.0.0.1:1",
        boot_id=boot_id,
        model_version="m",
        block_tokens=32,
    )


def test_a_member_without_lease_is_gone_at_once() -> None:
    """A single expired or returned lease is believed."""
    view = View()
    assert view.take([member("a"), member("b")], 0.0)
    assert not view.take([member("b"), member("a")], 1.0)
    assert view.take([member("b")], 2.0)
    assert set(view.members) == {"b"}


def test_a_redis_that_came_back_empty_takes_nobody_away() -> None:
    """After a break the last view stays for a lease time, and new members are seen meanwhile."""
    view = View()
    view.take([member("a"), member("b")], 0.0)
    view.doubt(10.0)
    assert not view.take([], 10.5)
    assert view.take([member("b", "b2")], 11.0)
    assert view.members["b"].boot_id == "b2"
    assert set(view.members) == {"a", "b"}
    assert view.take([member("b", "b2")], 10.0 + LEASE_S)
    assert set(view.members) == {"b"}


def test_all_gone_together_is_believed_after_a_lease_time_only() -> None:
    """A Redis wiped between two polls looks like everybody died; if they really did, the view follows 3 s later."""
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
