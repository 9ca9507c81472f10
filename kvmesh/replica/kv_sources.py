"""Addresses from which KV blocks may be pulled: those of registered prefill replicas of the own pool and version. Pure.

A handoff that names another address is refused. Decode replicas make no handoffs, so their addresses are not sources.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvmesh.membership.member import Member

KEPT_S: Final = 30.0
"""An address stays allowed this long after its replica left the membership. A replica that drains, or that lost its name
to another process, still holds handoffs. Engines hold them no longer by default (engine.handoff_timeout_s)."""


class KvSources:
    """The registered KV addresses. Empty, so that every handoff is refused, until the membership was read once."""

    __slots__ = ("_listed", "_model_version", "_pool", "_unlisted", "boots")

    def __init__(self, pool: str, model_version: str) -> None:
        self._pool = pool
        self._model_version = model_version
        self.boots: frozenset[object] = frozenset()
        """The registered prefill replicas: name, and boot ids of the process and of its engine."""
        self._listed: frozenset[str] = frozenset()
        self._unlisted: dict[str, float] = {}
        """Addresses that were listed, with the end of their permission."""

    def take(self, members: Iterable[Member], now_s: float) -> None:
        """Take the members of the mesh."""
        sources = [member for member in members if self._is_source(member)]
        self.boots = frozenset((one.process_id, one.boot_id, one.engine_boot_id) for one in sources)
        listed = frozenset(one.kv_address for one in sources)
        unlisted = {address: until_s for address, until_s in self._unlisted.items() if until_s > now_s}
        unlisted.update(dict.fromkeys(self._listed - listed, now_s + KEPT_S))
        self._listed, self._unlisted = listed, unlisted

    def allows(self, address: str, now_s: float) -> bool:
        """True if blocks may be pulled from `address`. An empty one: a registered engine tells no address."""
        return address in self._listed or self._unlisted.get(address, now_s) > now_s

    def _is_source(self, member: Member) -> bool:
        return (
            member.role == "prefill"
            and member.pool == self._pool
            and member.model_version == self._model_version
        )
