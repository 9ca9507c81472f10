"""The topology of a mesh: from leases and the snapshot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from controlplane.xds.mesh_topology import topology_of
from controlplane.xds.topology import Endpoint, RegionFrontends
from kvmesh.membership.member import Member
from kvmesh.snapshot.content import Content, Cordon, PoolTrack, Track
from kvmesh.snapshot.regions import DeclaredState, ObservedState, RegionEntry, RegionProcess

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


def region_of(entry: RegionEntry) -> RegionFrontends:
    """Return the region us, which the snapshot has as `entry`, as the region eu sees it."""
    content = replace(CONTENT, regions=(RegionEntry("eu"), entry))
    eu, us = topology_of("kvmesh", "eu", [member("frontend-0", "10.0.0.1:7000")], content).topology.regions
    assert eu == RegionFrontends("eu", (Endpoint("10.0.0.1:7000"),))
    return us


def frontend(name: str, address: str, *, is_draining: bool = False) -> RegionProcess:
    """Return a frontend of another region."""
    return RegionProcess(name, address, f"{name}-boot", is_draining=is_draining)


def test_frontends_of_other_regions_come_from_the_snapshot() -> None:
    """With those that drain."""
    found = region_of(
        RegionEntry(
            "us",
            frontends=(
                frontend("frontend-0", "10.1.0.1:7000"),
                frontend("frontend-1", "10.1.0.2:7000", is_draining=True),
            ),
        )
    )
    assert found == RegionFrontends("us", (Endpoint("10.1.0.1:7000"), Endpoint("10.1.0.2:7000", True)))


@pytest.mark.parametrize("declared", DeclaredState)
@pytest.mark.parametrize("observed", ObservedState)
@pytest.mark.parametrize("weight", [0, 30, 100])
def test_states_of_a_region(declared: DeclaredState, observed: ObservedState, weight: int) -> None:
    """A declared drain counts once its weight is 0; until then frontends move what they must."""
    found = region_of(RegionEntry("us", declared, observed, weight))
    assert found.is_draining == (declared is not DeclaredState.SERVING and weight == 0)
    assert found.is_out == (observed is ObservedState.OUT)
    assert found.is_recovering == (observed is ObservedState.RECOVERING)


def test_the_own_region_drains_as_it_declares() -> None:
    """Its frontends are those of the leases."""
    own = RegionEntry("eu", DeclaredState.DRAINED, weight_percent=0)
    content = replace(CONTENT, regions=(own, RegionEntry("us")))
    eu, us = topology_of("kvmesh", "eu", [member("frontend-0", "10.0.0.1:7000")], content).topology.regions
    assert eu == RegionFrontends("eu", (Endpoint("10.0.0.1:7000"),), is_draining=True)
    assert us == RegionFrontends("us", ())


def test_a_drained_region_takes_calls_while_no_region_gets_load() -> None:
    """Its frontends listen then: callers have nowhere else to go."""
    own = RegionEntry("eu", DeclaredState.DRAINED, weight_percent=0)
    for weight in (0, 1):
        dead = RegionEntry("us", DeclaredState.SERVING, ObservedState.OUT, weight)
        content = replace(CONTENT, regions=(own, dead))
        eu, _ = topology_of("kvmesh", "eu", [member("frontend-0", "10.0.0.1:7000")], content).topology.regions
        assert eu.is_draining == (weight > 0)


def test_a_foreign_frontend_without_an_ip_address_is_named_with_its_region() -> None:
    """Names are unique in one region only."""
    entry = RegionEntry("us", frontends=(frontend("frontend-0", "frontend.example:7000"),))
    content = replace(CONTENT, regions=(RegionEntry("eu"), entry))
    assert topology_of("kvmesh", "eu", [], content).left_out == ("us/frontend-0",)
