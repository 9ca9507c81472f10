"""The topology of a mesh: the own region from its leases, the others from the snapshot. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from controlplane.xds.checks import is_dialable
from controlplane.xds.topology import Endpoint, RegionFrontends, Topology
from kvmesh.membership.member import Member
from kvmesh.snapshot.availability import Availability, availability_of
from kvmesh.snapshot.content import Content
from kvmesh.snapshot.regions import ObservedState, RegionEntry

FRONTEND = "frontend"


@dataclass(frozen=True, slots=True)
class Found:
    """A topology, and the frontends that it cannot have."""

    topology: Topology
    left_out: tuple[str, ...]
    """Names of frontends with an address that is no IP address, as xDS needs it. Those of other regions: REGION/NAME."""


@dataclass(frozen=True, slots=True)
class _Frontend:
    name: str
    endpoint: Endpoint


def topology_of(mesh: str, own: str, members: Iterable[Member], content: Content) -> Found:
    """Return the topology for `own`, the region of this process. `members`: the leases in the region's Redis."""
    entries = {entry.name: entry for entry in content.regions}
    entries.setdefault(own, RegionEntry(own))
    regions, left_out = [], []
    for name, entry in sorted(entries.items()):
        found = list(_leased(members, content) if name == own else _told(entry))
        left_out += [one.name for one in found if not is_dialable(one.endpoint.address)]
        endpoints = _unique(one.endpoint for one in found if is_dialable(one.endpoint.address))
        regions.append(_region(entry, endpoints, is_draining=content.is_region_drained(name)))
    return Found(Topology(mesh, own, tuple(regions)), tuple(left_out))


def _region(entry: RegionEntry, endpoints: tuple[Endpoint, ...], *, is_draining: bool) -> RegionFrontends:
    """Return a region in its states. A declared drain counts at its end: until then the frontends move what they must."""
    return RegionFrontends(
        entry.name,
        endpoints,
        is_draining=is_draining,
        is_out=entry.observed is ObservedState.OUT,
        is_recovering=entry.observed is ObservedState.RECOVERING,
    )


def _leased(members: Iterable[Member], content: Content) -> Iterator[_Frontend]:
    for member in members:
        if member.role == FRONTEND:
            yield _Frontend(member.process_id, Endpoint(member.address, _is_draining(member, content)))


def _told(entry: RegionEntry) -> Iterator[_Frontend]:
    for one in entry.frontends:
        yield _Frontend(f"{entry.name}/{one.process_id}", Endpoint(one.address, one.is_draining))


def _is_draining(member: Member, content: Content) -> bool:
    """True if the frontend takes no new calls. The lease or the snapshot may say so first."""
    availability, _ = availability_of(content, member.process_id, member.boot_id)
    is_aside = member.state in (Availability.CORDONED.value, Availability.DRAINING.value)
    return member.draining or is_aside or availability is not Availability.SERVING


def _unique(endpoints: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
    """Return one endpoint per address. A lease that outlives its process says that it drains; its successor does not."""
    found: dict[str, Endpoint] = {}
    for one in endpoints:
        known = found.get(one.address)
        if known is None or known.is_draining:
            found[one.address] = one
    return tuple(found[address] for address in sorted(found))
