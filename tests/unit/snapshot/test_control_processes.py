"""Leases of control processes: old ones and junk do not count."""

from __future__ import annotations

import msgspec

from kvmesh.snapshot.control_processes import LEASE_S, ControlProcess, live


def lease(name: str, at_ms: int, address: str = "h:1") -> bytes:
    """Return a lease as a later release may write it."""
    known = ControlProcess(process_id=name, boot_id="b", address=address, at_ms=at_ms)
    return msgspec.json.encode({**msgspec.to_builtins(known), "later": [1]})


def test_only_fresh_readable_leases_count() -> None:
    """In the order of their names; a lease from the future of this Redis counts, because its clock may have stepped."""
    now_ms = 1_000_000
    oldest_ms = now_ms - round(LEASE_S * 1000)
    leases = [
        lease("control-2", now_ms),
        lease("control-1", oldest_ms),
        lease("control-0", oldest_ms - 1),
        lease("control-3", now_ms + 60_000),
        lease("control-4", now_ms, address=""),
        b"",
        b"\xff",
        b"[]",
        b'{"process_id": 3}',
    ]
    assert [each.process_id for each in live(leases, now_ms)] == ["control-1", "control-2", "control-3"]
