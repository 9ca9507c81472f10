"""The document of regions: their declarations and operators' avoid orders. Pure.

They are part of the desired document. Declarations of other regions are kept for them: a region that lost its memory gets
its own back from its peers.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from controlplane.regions.declared import Declared, merge
from controlplane.regions.observed import Avoid


class AvoidEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An avoid order as it is written down: monotonic times do not survive their process."""

    is_ok: bool = False
    until_s: float = 0.0
    """Unix time of its end."""
    reason: str = ""
    author: str = ""

    def order(self, now_s: float, wall_s: float) -> Avoid:
        """Return the order with its end on the monotonic clock of this process."""
        return Avoid(self.is_ok, now_s + self.until_s - wall_s, self.reason, self.author)


class RegionOrders(msgspec.Struct, frozen=True, kw_only=True):
    """See the module. Unknown keys are ignored, because a later release may write more."""

    declared: Mapping[str, Declared] = {}
    avoids: Mapping[str, AvoidEntry] = {}

    def with_declared(self, region: str, declared: Declared) -> RegionOrders:
        """Return the orders with a declaration, if it is later than the known one."""
        known = self.declared.get(region, Declared())
        if merge(known, declared) is known:
            return self
        return replace(self, declared={**self.declared, region: declared})

    def with_avoid(self, region: str, entry: AvoidEntry) -> RegionOrders:
        """Return the orders with an avoid order in place of an earlier one for the region."""
        return replace(self, avoids={**self.avoids, region: entry})

    def without_ended(self, wall_s: float) -> RegionOrders:
        """Return the orders without avoid orders that are over."""
        kept = {region: entry for region, entry in self.avoids.items() if wall_s < entry.until_s}
        return self if len(kept) == len(self.avoids) else replace(self, avoids=kept)
