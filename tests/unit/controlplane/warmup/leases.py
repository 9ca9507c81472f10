"""Leases of replicas for the tests of lives."""

from __future__ import annotations

from typing import Literal

from kvmesh.membership.member import Member


def lease(
    name: str,
    state: str,
    role: Literal["prefill", "decode"] = "decode",
    boot_id: str = "b1",
    engine: str = "e1",
    kv_address: str = "",
    pool: str = "default",
) -> Member:
    """Return the lease of a replica in `state`. `engine`: boot of its engine."""
    return Member(
        process_id=name,
        role=role,
        pool=pool,
        address=f"{name}:1",
        boot_id=boot_id,
        model_version="v1",
        block_tokens=4,
        state=state,
        draining=state != "serving",
        capabilities=("life",),
        engine_boot_id=f"{name}-{engine}",
        kv_address=kv_address,
    )
