"""The members of the router's pool: its peer routers, the replicas that it serves, and those that it refuses. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvmesh.membership.member import Member
from kvmesh.membership.pool_mismatch import REPLICAS, facts_of, mismatch

REFUSED: Final = "Replicas of the pool that the router refuses: another version, block size or digest."


class PoolMembers:
    """Filters the members of the mesh by the pool of `own`, the lease of this router."""

    def __init__(self, own: Member) -> None:
        self._own = own
        self.refused: dict[str, str] = {}
        """Mismatch of each refused replica, by process id."""
        self.routers: list[tuple[str, str]] = []
        """Routers of the pool with this router's version, itself included: process id and boot id."""
        self.has_other_router = False
        """True while another one of `routers` takes new requests."""

    def take(self, members: Iterable[Member]) -> list[str]:
        """Take the members of the mesh. Return a sentence for each mismatch that is new."""
        own, before = self._own, self.refused
        of_pool = [member for member in members if member.pool == own.pool]
        facts = facts_of(of_pool, own)
        replicas = [member for member in of_pool if member.role in REPLICAS]
        self.refused = {
            member.process_id: reason for member in replicas if (reason := mismatch(member, facts))
        }
        routers = [
            member
            for member in of_pool
            if member.role == "router" and member.model_version == own.model_version
        ]
        self.routers = [(member.process_id, member.boot_id) for member in routers]
        self.has_other_router = any(
            member.boot_id != own.boot_id and not member.draining for member in routers
        )
        return [
            f"replica {name} of pool {own.pool} is refused: {reason}"
            for name, reason in self.refused.items()
            if before.get(name) != reason
        ]

    def serves(self, member: Member) -> bool:
        """Return True if this router places requests on `member`, one of the members taken last."""
        return (
            member.role in REPLICAS
            and member.pool == self._own.pool
            and member.process_id not in self.refused
        )
