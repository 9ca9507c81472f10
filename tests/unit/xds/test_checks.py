"""The rules that resources must keep: each one is broken once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from controlplane.xds.checks import is_dialable, resource_faults, topology_faults
from controlplane.xds.resources import Messages, resources_of
from controlplane.xds.topology import RegionFrontends, Topology
from tests.unit.xds.topologies import EU_AND_US, region, schema, topology


def messages() -> Messages:
    """Return good resources, to break one of them."""
    return resources_of(EU_AND_US, "eu", schema())


def faults(found: Messages) -> list[str]:
    """Return the faults of `found`."""
    return list(resource_faults(found, schema()))


def manager(change: Callable[[Any], object]) -> Callable[[Messages], object]:
    """Return a function that applies `change` to the connection manager."""

    def apply(found: Messages) -> None:
        packed = found.listener.api_listener.api_listener
        inner = schema().unpack(packed)
        change(inner)
        packed.value = inner.SerializeToString()

    return apply


def weigh(found: Messages, *weights: int) -> None:
    """Replace the cluster of the route by weighted ones, the first of which exists."""
    action = found.routes.virtual_hosts[0].routes[0].route
    for weight in weights:
        added = action.weighted_clusters.clusters.add(name="kvmesh")
        added.weight.value = weight


def gap(found: Messages) -> None:
    found.endpoints.endpoints[1].priority = 2


def no_weight(found: Messages) -> None:
    found.endpoints.endpoints[0].ClearField("load_balancing_weight")


def twice(found: Messages) -> None:
    copied = found.endpoints.endpoints[0].lb_endpoints[0]
    found.endpoints.endpoints[1].lb_endpoints.add().CopyFrom(copied)


def same_locality(found: Messages) -> None:
    del found.endpoints.endpoints[1].lb_endpoints[:]
    found.endpoints.endpoints[1].priority = 0
    found.endpoints.endpoints[1].locality.region = "eu"


def heavy(found: Messages) -> None:
    for each in found.endpoints.endpoints:
        each.priority, each.load_balancing_weight.value = 0, (1 << 32) - 1


def first_socket(found: Messages) -> Any:
    """Return the first address of the endpoints."""
    return found.endpoints.endpoints[0].lb_endpoints[0].endpoint.address.socket_address


BROKEN: dict[str, tuple[Callable[[Messages], object], str]] = {
    "priority gap": (gap, "priority 1 is empty"),
    "no weight": (no_weight, 'locality "eu" has no load_balancing_weight'),
    "no locality": (lambda found: found.endpoints.ClearField("endpoints"), "no priority has a locality"),
    "weights too large": (heavy, "the weights of priority 0 sum to 8589934590"),
    "locality twice": (same_locality, "priority 0 has the locality eu// 2 times"),
    "address twice": (twice, "the address 10.0.0.1, port 7000, is named 2 times"),
    "name for an address": (
        lambda found: setattr(first_socket(found), "address", "frontend.example"),
        "has the address 'frontend.example'",
    ),
    "any address": (lambda found: setattr(first_socket(found), "address", "0.0.0.0"), "has the address"),
    "port 0": (lambda found: setattr(first_socket(found), "port_value", 0), "has the port 0"),
    "endpoint of weight 0": (
        lambda found: found.endpoints.endpoints[0].lb_endpoints[0].load_balancing_weight.SetInParent(),
        "has an endpoint of the weight 0",
    ),
    "endpoints of another cluster": (
        lambda found: setattr(found.endpoints, "cluster_name", "other"),
        'the endpoints are of "other"',
    ),
    "cluster without a name": (lambda found: found.cluster.ClearField("name"), "a cluster has no name"),
    "static cluster": (lambda found: found.cluster.ClearField("type"), "has the type 0"),
    "unknown policy": (lambda found: setattr(found.cluster, "lb_policy", 5), "has the lb_policy 5"),
    "no ads": (lambda found: found.cluster.ClearField("eds_cluster_config"), "its endpoints from no ADS"),
    "listener without a name": (lambda found: found.listener.ClearField("name"), "a listener has no name"),
    "no manager": (lambda found: found.listener.ClearField("api_listener"), "has no connection manager"),
    "no router filter": (manager(lambda inner: inner.ClearField("http_filters")), "has 0 filters"),
    "two router filters": (
        manager(lambda inner: inner.http_filters.add().CopyFrom(inner.http_filters[0])),
        "has 2 filters",
    ),
    "routes of another name": (
        manager(lambda inner: setattr(inner.rds, "route_config_name", "other")),
        'has the routes "other"',
    ),
    "routes without ads": (
        manager(lambda inner: inner.rds.ClearField("config_source")),
        "takes its routes from no ADS",
    ),
    "no host for all": (
        lambda found: found.routes.virtual_hosts[0].ClearField("domains"),
        'have no virtual host for "*"',
    ),
    "host without routes": (
        lambda found: found.routes.virtual_hosts[0].ClearField("routes"),
        "has no routes",
    ),
    "unknown cluster": (
        lambda found: setattr(found.routes.virtual_hosts[0].routes[0].route, "cluster", "other"),
        'a route goes to the cluster "other"',
    ),
    "all weights zero": (lambda found: weigh(found, 0, 0), "the weights of a route sum to 0"),
}


def test_good_resources_have_no_fault() -> None:
    """The rules let pass what is published."""
    assert faults(messages()) == []


@pytest.mark.parametrize("which", BROKEN)
def test_a_broken_rule_is_named(which: str) -> None:
    """One fault each, with field, value and allowed range."""
    change, text = BROKEN[which]
    found = messages()
    change(found)
    assert any(text in fault for fault in faults(found)), faults(found)


def test_weights_that_sum_to_more_than_zero_are_good() -> None:
    """A cluster of weight 0 beside another one is a canary that waits."""
    found = messages()
    weigh(found, 0, 1)
    assert faults(found) == []


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (Topology("", "eu", EU_AND_US.regions), "listener is ''"),
        (Topology("kvmesh", "eu", ()), "0 regions"),
        (topology(region("eu")), "0 frontends in all regions"),
        (topology(region("eu", "h:1")), "'h:1'; allowed is IP:PORT"),
        (topology(region("eu", "10.0.0.1:1"), region("eu", "10.0.0.2:1")), '"eu" is named 2 times'),
        (topology(region("us", "10.0.0.1:1"), own="eu"), 'the own region "eu" is missing'),
        (topology(region("e\nu", "10.0.0.1:1")), "a region has the name"),
        (topology(region("\ud800", "10.0.0.1:1")), "a region has the name"),
        (topology(region("eu", *(f"10.0.{n >> 8}.{n & 255}:1" for n in range(4097)))), "4097 frontends"),
        (topology(*(RegionFrontends(f"r{n}", ()) for n in range(129))), "129 regions"),
    ],
)
def test_a_topology_that_cannot_be_published_is_named(found: Topology, text: str) -> None:
    """Field, value and allowed range."""
    assert any(text in fault for fault in topology_faults(found)), list(topology_faults(found))


@pytest.mark.parametrize(
    ("address", "is_good"),
    [
        ("10.0.0.1:7000", True),
        ("[fd00::1]:7000", True),
        ("fd00::1:7000", False),
        ("frontend:7000", False),
        ("10.0.0.1", False),
        ("10.0.0.1:0", False),
        ("10.0.0.1:65536", False),
        ("10.0.0.1:٣", False),
        ("0.0.0.0:7000", False),
        ("", False),
    ],
)
def test_an_address_needs_an_ip_and_a_port(address: str, is_good: bool) -> None:
    """xDS knows no names."""
    assert is_dialable(address) is is_good
