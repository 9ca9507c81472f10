"""Frontends of the own region: from leases and the snapshot."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from controlplane.xds.mesh_topology import topology_of
from controlplane.xds.topology import Endpoint
from kvmesh.membership.member import Member
from kvmesh.snapshot.content import Content, Cordon, PoolTrack, Track

CONTENT = Content((PoolTrack("default", "v1", Track.STABLE, 100),))


def member(name: str, address: str, role: str = "frontend", **more: Any) -> Member:
    """Return the lease of a process."""
    fields = {"process_id": name, "role": role, "address": address, "boot_id": f"{name}-boot", **more}
    return msgspec.convert({"model_version": "v1", "block_tokens": 32, **fields}, Member)


def endpoints(*members: Member, content: Content = CONTENT) -> tuple[Endpoint, ...]:
    """Return the endpoints of the own region."""
    (own,) = topology_of("kvmesh", "eu", members, content).topology.regions
    assert own.name == "eu"
    return own.endpoints


def test_frontends_alone_are_endpoints() -> None:
    """Other roles take no calls of clients."""
    found = endpoints(member("frontend-0", "10.0.0.1:7000"), member("router-0", "10.0.0.2:7000", "router"))
    assert found == (Endpoint("10.0.0.1:7000"),)


@pytest.mark.parametrize(
    ("more", "cordons"),
    [
        ({"draining": True}, ()),
        ({"state": "draining"}, ()),
        ({"state": "cordoned"}, ()),
        ({}, (Cordon("frontend-0"),)),
        ({}, (Cordon("frontend-0", "frontend-0-boot", is_draining=True),)),
    ],
)
def test_a_frontend_that_is_aside_drains(more: dict[str, Any], cordons: tuple[Cordon, ...]) -> None:
    """Its lease says so, or the snapshot."""
    content = Content(CONTENT.pools, cordons=cordons)
    found = endpoints(member("frontend-0", "10.0.0.1:7000", **more), content=content)
    assert found == (Endpoint("10.0.0.1:7000", is_draining=True),)


def test_a_cordon_of_another_boot_does_not_count() -> None:
    """The process has been restarted since."""
    content = Content(CONTENT.pools, cordons=(Cordon("frontend-0", "earlier"),))
    assert endpoints(member("frontend-0", "10.0.0.1:7000"), content=content) == (Endpoint("10.0.0.1:7000"),)


def test_a_frontend_without_an_ip_address_is_left_out_and_named() -> None:
    """One lease with a name must not keep all others from being published."""
    members = (member("frontend-0", "10.0.0.1:7000"), member("frontend-1", "frontend-1.example:7000"))
    found = topology_of("kvmesh", "eu", members, CONTENT)
    assert found.left_out == ("frontend-1",)
    assert found.topology.regions[0].endpoints == (Endpoint("10.0.0.1:7000"),)


@pytest.mark.parametrize("order", [1, -1])
def test_an_address_in_two_leases_is_named_once(order: int) -> None:
    """The lease of a former process at that address says that it drains; the process there now takes calls."""
    members = (
        member("frontend-0", "10.0.0.1:7000", draining=True),
        member("frontend-1", "10.0.0.1:7000"),
    )
    assert endpoints(*members[::order]) == (Endpoint("10.0.0.1:7000"),)
