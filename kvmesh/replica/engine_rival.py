"""Two replicas with one engine: a mistake in the addresses. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kvmesh.membership.member import Member


def rival_of(process_id: str, engine_boot_id: str, members: Iterable[Member]) -> str:
    """Return the name of another replica whose lease names the same boot of an engine; empty: there is none.

    Both would count the engine's blocks and places as theirs, and routers would place twice of what it holds.
    """
    if not engine_boot_id:
        return ""
    names = (
        one.process_id
        for one in members
        if one.engine_boot_id == engine_boot_id and one.process_id != process_id
    )
    return min(names, default="")
