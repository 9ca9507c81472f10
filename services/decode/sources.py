"""Addresses KV blocks may be pulled from: those of registered prefill replicas, whatever a handoff says. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kvmesh.membership.member import Member


class KvSources:
    """The registered KV addresses. Empty until the membership was read once: then every handoff is refused."""

    __slots__ = ("_addresses",)

    def __init__(self, addresses: Iterable[str] = ()) -> None:
        self._addresses = frozenset(addresses)

    def take(self, members: Iterable[Member]) -> None:
        """Take the members of the mesh."""
        self._addresses = frozenset(
            member.kv_address for member in members if member.role == "prefill" and member.kv_address
        )

    def allows(self, address: str) -> bool:
        """True if blocks may be pulled from `address`."""
        return address in self._addresses
