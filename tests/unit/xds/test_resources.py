"""Resources of random topologies: what every caller can rely on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

import pytest

from controlplane.xds.checks import resource_faults, topology_faults
from controlplane.xds.resource_set import CLUSTER, ENDPOINTS, LISTENER, ROUTES
from controlplane.xds.resources import UNLIMITED, Messages, resources_of
from controlplane.xds.topology import Endpoint, RegionFrontends, Topology
from tests.unit.xds.topologies import EU_AND_US, NAMES, random_topology, region, schema, topology

SEEDS = range(200)
DRAINING, HEALTHY = 3, 1
"""Values of HealthStatus."""


def made(found: Topology, caller: str) -> Messages:
    """Return the resources of `found` for a caller of the region `caller`."""
    return resources_of(found, caller, schema())


def addresses(locality: Any) -> list[str]:
    """Return the addresses of a locality that get new calls, and of those that drain."""
    sockets = (one.endpoint.address.socket_address for one in locality.lb_endpoints)
    return [f"{each.address}:{each.port_value}" for each in sockets]


@cache
def cases() -> Sequence[tuple[str, Topology, str, Any]]:
    """Return random topologies with the endpoints of each caller region, an unknown one among them."""
    topologies = [(seed, random_topology(Random(seed))) for seed in SEEDS]
    return [
        (f"seed={seed}, {caller}", found, caller, made(found, caller).endpoints)
        for seed, found in topologies
        for caller in (*NAMES, "")
    ]


def test_resources_of_any_topology_pass_the_checks() -> None:
    """No client would refuse them."""
    for seed in SEEDS:
        found = random_topology(Random(seed))
        assert list(topology_faults(found)) == [], f"seed={seed}"
        for one in found.regions:
            assert list(resource_faults(made(found, one.name), schema())) == [], f"seed={seed}"


def test_priorities_have_no_gap_and_one_locality_each() -> None:
    """Each region has a priority, also one without endpoints."""
    for which, found, _, endpoints in cases():
        priorities = [each.priority for each in endpoints.endpoints]
        assert priorities == list(range(len(found.regions))), which
        assert {each.locality.region for each in endpoints.endpoints} == {
            one.name for one in found.regions
        }, which
        assert all(each.load_balancing_weight.value for each in endpoints.endpoints), which


def test_the_first_priority_is_the_callers_region() -> None:
    """A caller of an unknown region counts as a caller of the own region."""
    for which, found, caller, endpoints in cases():
        known = {one.name for one in found.regions}
        home = caller if caller in known else found.own
        assert endpoints.endpoints[0].locality.region == home, which


def test_an_address_is_named_once() -> None:
    """gRPC would refuse the same address in two localities."""
    for which, _, _, endpoints in cases():
        named = [address for each in endpoints.endpoints for address in addresses(each)]
        assert len(set(named)) == len(named), which


def test_each_frontend_of_a_region_that_is_not_out_is_reachable() -> None:
    """Left out are regions that are out, and the first one while it recovers and another one takes calls."""
    for which, found, caller, endpoints in cases():
        named = {address for each in endpoints.endpoints for address in addresses(each)}
        home, *_ = found.in_order(caller)
        waits = home.is_recovering and any(each.takes_calls for each in found.regions)
        there = [each for each in found.regions if not each.is_out and not (waits and each is home)]
        assert named == {one.address for each in there for one in each.endpoints}, which


def test_a_caller_always_has_an_endpoint_where_a_region_has_one() -> None:
    """A region that recovers is better than none."""
    for which, found, _, endpoints in cases():
        named = [one.address for each in found.regions for one in each.endpoints]
        if len(set(named)) < len(named):
            continue  # the state of the address in another region may hide it
        able = [each for each in found.regions if not each.is_out and not each.is_draining]
        if any(not one.is_draining for each in able for one in each.endpoints):
            states = {one.health_status for each in endpoints.endpoints for one in each.lb_endpoints}
            assert HEALTHY in states, which


def test_a_region_that_recovers_is_no_first_choice_yet() -> None:
    """gRPC clients return at once, so that its callers wait until it has recovered. Others may fall back to it."""
    recovering = RegionFrontends("eu", (Endpoint("10.0.0.1:7000"),), is_recovering=True)
    found = topology(recovering, region("us", "10.1.0.1:7000"))
    assert [len(each.lb_endpoints) for each in made(found, "eu").endpoints.endpoints] == [0, 1]
    assert [len(each.lb_endpoints) for each in made(found, "us").endpoints.endpoints] == [1, 1]
    alone = topology(recovering, region("us", "10.1.0.1:7000", is_draining=True))
    assert [len(each.lb_endpoints) for each in made(alone, "eu").endpoints.endpoints] == [1, 1]


def test_a_region_that_is_out_keeps_its_priority_without_endpoints() -> None:
    """An empty first priority moves its callers to the second one."""
    for which, found, _, endpoints in cases():
        out = {one.name for one in found.regions if one.is_out}
        for each in endpoints.endpoints:
            assert each.locality.region not in out or not each.lb_endpoints, which


def test_frontends_of_a_draining_region_get_no_new_calls() -> None:
    """All of them are DRAINING, and in other regions those frontends that drain."""
    for which, found, _, endpoints in cases():
        regions = {one.name: one for one in found.regions}
        for each in endpoints.endpoints:
            one = regions[each.locality.region]
            for endpoint, address in zip(each.lb_endpoints, addresses(each), strict=True):
                own = next(known for known in one.endpoints if known.address == address)
                is_draining = one.is_draining or own.is_draining
                assert endpoint.health_status == (DRAINING if is_draining else HEALTHY), which


def test_a_caller_has_the_same_order_whatever_the_states_are() -> None:
    """Names alone decide, so a state that changes back changes nothing."""
    for seed in SEEDS:
        found = random_topology(Random(seed))
        bare = Topology(
            found.listener,
            found.own,
            tuple(RegionFrontends(one.name, ()) for one in reversed(found.regions)),
        )
        for caller in NAMES:
            ordered = [one.name for one in found.in_order(caller)]
            assert ordered == [one.name for one in bare.in_order(caller)], f"seed={seed}"


def test_callers_of_different_regions_have_different_second_choices() -> None:
    """The callers of a lost region do not all move to one region with those of another lost one."""
    found = topology(*(region(name, f"10.0.0.{at}:1") for at, name in enumerate(NAMES, start=1)))
    seconds = [made(found, caller).endpoints.endpoints[1].locality.region for caller in NAMES]
    assert sorted(seconds) == sorted(NAMES)


def test_only_the_endpoints_change_with_frontends_and_states() -> None:
    """A client keeps its cluster, its listener and its routes, so a change never breaks them."""
    changed = topology(region("eu", "10.9.0.1:7000", is_draining=True), region("us", is_out=True))
    before, after = (made(one, "us").serialized().by_type for one in (EU_AND_US, changed))
    assert {kind for kind in before if before[kind] != after[kind]} == {ENDPOINTS}
    assert set(before) == {CLUSTER, ENDPOINTS, LISTENER, ROUTES}


def test_resources_do_not_depend_on_the_order_of_the_input() -> None:
    """Two servers with the same frontends give the same versions."""
    mixed = Topology(
        "kvmesh",
        "eu",
        tuple(
            RegionFrontends(one.name, tuple(reversed(one.endpoints))) for one in reversed(EU_AND_US.regions)
        ),
    )
    assert made(mixed, "us").serialized() == made(EU_AND_US, "us").serialized()


def test_ipv6_addresses_lose_their_brackets() -> None:
    """xDS has address and port in two fields."""
    found = made(topology(region("eu", "[fd00::1]:7000")), "eu").endpoints.endpoints[0]
    assert addresses(found) == ["fd00::1:7000"]


def test_long_streams_meet_no_limit_of_a_client() -> None:
    """The default of 1,024 running calls, and Envoy's 15 s for a route, would end them."""
    found = made(EU_AND_US, "eu")
    (limits,) = found.cluster.circuit_breakers.thresholds
    assert limits.max_requests.value == UNLIMITED
    (route,) = found.routes.virtual_hosts[0].routes
    assert route.route.HasField("timeout") and route.route.timeout.ToSeconds() == 0


@pytest.mark.parametrize(("caller", "home"), [("us", "us"), ("", "eu"), ("moon", "eu")])
def test_the_routes_name_the_callers_region(caller: str, home: str) -> None:
    """Envoy adds the header to calls that lack it."""
    (header,) = made(EU_AND_US, caller).routes.request_headers_to_add
    assert (header.header.key, header.header.value) == ("kvmesh-region", home)


def test_a_frontend_in_two_regions_belongs_to_the_first_of_the_caller() -> None:
    """Its state there counts."""
    shared = Endpoint("10.0.0.1:7000", is_draining=True)
    found = topology(RegionFrontends("eu", (shared,)), region("us", "10.0.0.1:7000"))
    for caller, state in (("eu", DRAINING), ("us", HEALTHY)):
        first, second = made(found, caller).endpoints.endpoints
        assert [one.health_status for one in first.lb_endpoints] == [state]
        assert not second.lb_endpoints
