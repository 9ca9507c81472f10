"""Configurations of regions in containers: their addresses are planned first, and then named in all of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Network

import msgspec

from kvmesh.config import MeshConfig
from kvmesh.region_sections import RegionTable
from kvmesh.roles import CONTROL
from tests.integration.containers.plan import Planned, planned


def plans_of(config: MeshConfig, subnet: IPv4Network) -> list[Planned]:
    """Return the planned parts of a region. Its addresses depend on the subnet and on the numbers of parts alone."""
    return list(planned(config, subnet, {}))


def joined(configs: Mapping[str, MeshConfig], subnets: Mapping[str, IPv4Network]) -> dict[str, MeshConfig]:
    """Return the configurations of all regions with the region's name and a table for each region.

    Regions have equal shares. Without [trust] they are `insecure`.
    """
    tables = {name: RegionTable(control=_controls(config, subnets[name])) for name, config in configs.items()}
    return {name: _of_region(config, name, tables) for name, config in configs.items()}


def _of_region(config: MeshConfig, name: str, tables: Mapping[str, RegionTable]) -> MeshConfig:
    is_trusted = bool(config.trust.certificate)
    region = msgspec.structs.replace(
        config.region, name=name, insecure=config.region.insecure or not is_trusted
    )
    return msgspec.structs.replace(config, region=region, regions=tables)


def _controls(config: MeshConfig, subnet: IPv4Network) -> tuple[str, ...]:
    addresses = tuple(plan.address for plan in plans_of(config, subnet) if plan.role == CONTROL)
    assert addresses, "a region in containers needs a control plane: control.replicas = 0"
    return addresses
