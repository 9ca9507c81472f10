"""The topology of a mesh, from the leases of the own region and the snapshot. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from controlplane.xds.checks import is_dialable
from controlplane.xds.topology import Endpoint, RegionFrontends, Topology
from kvmesh.membership.member import Member
from kvmesh.snapshot.availability import Availability, availability_of
from kvmesh.snapshot.content import Content

FRONTEND = "frontend"


@dataclass(frozen=True, slots=True)
class Found:
    """A topology, and the frontends that it cannot have."""

    topology: Topology
    left_out: tuple[str, ...]
    """Process ids of frontends with an address that is no IP address, as xDS needs it."""


def topology_of(mesh: str, own: str, members: Iterable[Member], content: Content) -> Found:
    """Return the topology for `own`, the region of this process. `members`: the leases in the region's Redis."""
    frontends = [member for member in members if member.role == FRONTEND]
    endpoints = tuple(
        Endpoint(member.address, _is_draining(member, content))
        for member in frontends
        if is_dialable(member.address)
    )
    left_out = tuple(member.process_id for member in frontends if not is_dialable(member.address))
    return Found(Topology(mesh, own, (RegionFrontends(own, _unique(endpoints)),)), left_out)


def _is_draining(member: Member, content: Content) -> bool:
    """True if the frontend takes no new calls. The lease or the snapshot may say so first."""
    availability, _ = availability_of(content, member.process_id, member.boot_id)
    is_aside = member.state in (Availability.CORDONED.value, Availability.DRAINING.value)
    return member.draining or is_aside or availability is not Availability.SERVING


def _unique(endpoints: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
    """Return one endpoint per address. A lease that outlives its process says that it drains; its successor does not."""
    found: dict[str, Endpoint] = {}
    for one in endpoints:
        known = found.get(one.address)
        if known is None or known.is_draining:
            found[one.address] = one
    return tuple(found[address] for address in sorted(found))
