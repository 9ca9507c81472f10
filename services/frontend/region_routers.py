"""Routers of other regions as members, for the links of a frontend. Pure.

The snapshot lists them, because no process reads the Redis of another region. A region with weight 0 has its links as well:
they are the probes of its data path, without which it would never count as recovered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

import msgspec

from kvmesh.membership.address_filter import AddressFilter
from kvmesh.membership.member import Member
from kvmesh.snapshot.regions import RegionEntry, RegionProcess

ROLE: Final = "router"


class RegionRouters:
    """Members that `links.update` takes. `own`: the own region. `admitted`: drops addresses outside `trust.networks`.

    `names`: the configured regions. A control process may know one more while a region is added.
    """

    def __init__(self, own: str, names: Collection[str], admitted: AddressFilter) -> None:
        self._own = own
        self._names = frozenset(names)
        self._admitted = admitted
        self._foreign: list[Member] = []

    def take(self, entries: Iterable[RegionEntry]) -> None:
        """Take the regions of the snapshot in force."""
        self._foreign = self._admitted.take(
            _member(entry.name, router)
            for entry in entries
            if entry.name != self._own and entry.name in self._names
            for router in entry.routers
        )

    def with_foreign(self, members: Iterable[Member]) -> list[Member]:
        """Return `members` of the own Redis, and the routers of other regions.

        A member of the own Redis is of the own region. Its lease may have another name while the region is being named.
        """
        return [*(self._as_own(member) for member in members), *self._foreign]

    def _as_own(self, member: Member) -> Member:
        is_own = member.region in ("", self._own)
        return member if is_own else msgspec.structs.replace(member, region="")


def _member(region: str, router: RegionProcess) -> Member:
    return Member(
        process_id=router.process_id,
        role=ROLE,
        address=router.address,
        boot_id=router.boot_id,
        model_version=router.model_version,
        block_tokens=router.block_tokens,
        draining=router.is_draining,
        capabilities=router.capabilities,
        pool=router.pool,
        region=region,
    )
