"""Topologies for the tests of xDS: random ones, and a small one."""

from __future__ import annotations

from functools import cache
from random import Random

from controlplane.xds.schema import Schema, load
from controlplane.xds.topology import Endpoint, RegionFrontends, Topology

NAMES = ("ap", "eu", "sa", "us")


@cache
def schema() -> Schema:
    """Return the schema. It never changes."""
    return load()


def region(name: str, *addresses: str, is_draining: bool = False, is_out: bool = False) -> RegionFrontends:
    """Return a region with a frontend at each of `addresses`."""
    return RegionFrontends(name, tuple(map(Endpoint, addresses)), is_draining, is_out)


def topology(*regions: RegionFrontends, own: str = "") -> Topology:
    """Return a topology. Its own region is the first one, if no other is named."""
    return Topology("kvmesh", own or regions[0].name, regions)


EU_AND_US = topology(
    region("eu", "10.0.0.1:7000", "10.0.0.2:7000"), region("us", "10.1.0.1:7000", "[fd00::1]:7000")
)


def random_topology(chance: Random) -> Topology:
    """Return a topology that can be published. Addresses may be in several regions, and frontends and regions aside."""
    names = chance.sample(NAMES, chance.randint(1, len(NAMES)))
    addresses = [f"10.0.0.{number}:7000" for number in range(1, chance.choice((13, 250)))]
    regions = tuple(
        RegionFrontends(
            name,
            tuple(
                Endpoint(address, chance.random() < 0.2)
                for address in chance.choices(addresses, k=chance.randint(at == 0, 5))
            ),
            is_draining=chance.random() < 0.2,
            is_out=chance.random() < 0.2,
            is_recovering=chance.random() < 0.2,
        )
        for at, name in enumerate(names)
    )
    return Topology("kvmesh", chance.choice(names), regions)
