"""Leases for tests of pools."""

from __future__ import annotations

from typing import Any

import msgspec

from kvmesh.membership.member import Member


def lease(name: str, role: Any = "decode", **changes: Any) -> Member:
    """Return the lease of a process of pool "a" with version "v1"."""
    member = Member(
        process_id=name,
        role=role,
        address=f"{name}:7000",
        boot_id=f"boot-{name}",
        model_version="v1",
        block_tokens=32,
        pool="a",
        digests={"tokenizer": "t1", "engine": "e1"} if role in ("prefill", "decode") else {},
    )
    return msgspec.structs.replace(member, **changes)
