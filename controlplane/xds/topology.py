"""The frontends of all regions, as xDS resources are made of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One frontend."""

    address: str
    """IP address and port, "127.0.0.1:7000" or "[::1]:7000". xDS knows no names."""
    is_draining: bool = False
    """True if the frontend takes no new calls."""


@dataclass(frozen=True, slots=True)
class RegionFrontends:
    """One region as another one, or the region itself, sees it."""

    name: str
    endpoints: tuple[Endpoint, ...]
    is_draining: bool = False
    """True if the region is declared to drain: no new calls, while running ones end."""
    is_out: bool = False
    """True if the region is observed to be OUT: it is published without endpoints."""
    is_recovering: bool = False
    """True if the region is observed to be RECOVERING. gRPC clients would all return to it at once."""

    @property
    def takes_calls(self) -> bool:
        """True if callers of other regions may be sent here."""
        is_there = any(not one.is_draining for one in self.endpoints)
        return is_there and not (self.is_draining or self.is_out or self.is_recovering)


@dataclass(frozen=True, slots=True)
class Topology:
    """All regions of a mesh. `check_topology` (`checks`) says which topologies can be published."""

    listener: str
    """Name of the mesh, which clients dial as `xds:///NAME`."""
    own: str
    """Name of the region of this process. Callers of an unknown region count as callers of this one."""
    regions: tuple[RegionFrontends, ...]

    def in_order(self, caller_region: str) -> tuple[RegionFrontends, ...]:
        """Return the regions by priority for callers of `caller_region`: their own one first.

        The others follow in a ring by name. So callers of different regions have different second choices, and each
        caller always the same.
        """
        names = sorted(region.name for region in self.regions)
        home = caller_region if caller_region in names else self.own
        start = names.index(home) if home in names else 0
        rank = {name: (at - start) % len(names) for at, name in enumerate(names)}
        return tuple(sorted(self.regions, key=lambda region: rank[region.name]))
