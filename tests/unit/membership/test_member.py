"""Leases of this release and of the last one."""

from __future__ import annotations

import json

import msgspec

from kvmesh.membership.member import Member, decode

OLD = {
    "process_id": "decode-0",
    "role": "decode",
    "address": "a:1",
    "boot_id": "b",
    "model_version": "kvmesh-1",
    "block_tokens": 32,
    "kv_address": "a:2",
    "draining": False,
    "capabilities": ["kv_events"],
    "term": 3,
}
"""A lease of release 0.1.0."""


def test_a_lease_of_the_last_release_belongs_to_the_default_pool() -> None:
    """Its digests and its state are unknown."""
    member = decode(json.dumps(OLD).encode())
    assert (member.pool, member.state, member.snapshot, dict(member.digests)) == ("default", "", "", {})


def test_a_lease_survives_its_own_encoding() -> None:
    """All fields that a newer release may add are ignored."""
    member = msgspec.structs.replace(
        decode(json.dumps(OLD).encode()),
        pool="next",
        state="cordoned",
        snapshot="3.1",
        digests={"engine": "e"},
    )
    raw = json.loads(msgspec.json.encode(member))
    assert decode(json.dumps({**raw, "later": 1}).encode()) == member
    assert isinstance(member, Member)
