"""Callers of the router by home region: those of the own region, and guests. Pure.

The home of a caller is the region in its budget, else that of its frontend, else the own one. Callers of the own region are
counted. They are never charged, and no grant refuses them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from kvmesh.region_sections import UNNAMED
from kvmesh.regions.quantity import Quantity
from services.router.regions.guests import Guest
from services.router.regions.home import Home

UNKNOWN: Final = "unknown"
"""Shown instead of the name of a region that is not configured, so that callers cannot make up time series."""


class Callers:
    """See the module. `guests`: by region, all other regions of the configuration."""

    def __init__(self, own: str, regions: Collection[str]) -> None:
        self.own = Home(own)
        self.guests: Mapping[str, Guest] = {name: Guest(name) for name in sorted(regions) if name != own}
        self.unknown = Guest(UNKNOWN)
        """Callers of regions that are not configured. They never have a grant."""
        # A process that has not read the tables of regions yet calls its region "local".
        self._own_names = {"", own} | ({UNNAMED} - set(regions))

    def guest(self, region: str) -> Guest | None:
        """Return the guests from `region`. None: it is the own one."""
        if region in self._own_names:
            return None
        return self.guests.get(region, self.unknown)

    def home(self, region: str) -> Home:
        """Return the totals of the callers from `region`."""
        guest = self.guest(region)
        return self.own if guest is None else guest.home

    def renew(self, grants: Mapping[str, Quantity], now_s: float) -> None:
        """Take the grants of a message. Grants that it leaves out go on decaying."""
        for region, grant in grants.items():
            guest = self.guests.get(region)
            if guest is not None and grant.is_valid:
                guest.renew(grant, now_s)
