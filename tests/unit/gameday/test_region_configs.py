"""Configurations of regions name the planned control planes of all, and plan the same addresses again."""

from __future__ import annotations

from ipaddress import IPv4Network

import msgspec
import pytest

from kvmesh.config import describe, parse
from kvmesh.config_sections import Trust
from kvmesh.roles import CONTROL
from tests.integration.containers.plan import planned
from tests.integration.containers.region_configs import joined, plans_of
from tests.integration.live_mesh import configure

SUBNETS = {name: IPv4Network(f"10.1.{number}.0/24") for number, name in enumerate(("eu", "us", "ap"))}
SMALL = configure(control={"replicas": 1})
LARGE = configure(prefill={"replicas": 4}, control={"replicas": 3})
TRUSTED = Trust(certificate="/c/{role}.pem", key="/c/{role}.key", authority="/c/authority.pem")


def test_all_regions_know_the_control_planes_that_run() -> None:
    """Regions of unequal size get the same tables, which hold the addresses that the joined configurations plan."""
    configs = joined({"eu": SMALL, "us": LARGE, "ap": SMALL}, SUBNETS)
    running = {
        name: tuple(plan.address for plan in plans_of(config, SUBNETS[name]) if plan.role == CONTROL)
        for name, config in configs.items()
    }
    assert {name: len(addresses) for name, addresses in running.items()} == {"eu": 1, "us": 3, "ap": 1}
    for name, config in configs.items():
        assert config.region.name == name
        assert {region: table.control for region, table in config.regions.items()} == running


def test_a_container_gets_its_http_port_from_the_image() -> None:
    """An image of release 0.1.0 has none, and would refuse the option."""
    config = configure(frontend={"http_port": 8080, "replicas": 2})
    plans = list(planned(config, SUBNETS["eu"], {}))
    assert sum(plan.role == "frontend" for plan in plans) == 2
    assert not any("--http-port" in plan.command for plan in plans if plan.role != "engine")


def test_the_configuration_file_says_the_same() -> None:
    """A part reads the regions from its file as they were joined."""
    for config in joined({"eu": SMALL, "us": LARGE}, SUBNETS).values():
        read = parse(describe(config))
        assert (read.region, read.regions) == (config.region, config.regions)


def test_regions_with_certificates_are_not_insecure() -> None:
    """Only regions without [trust] need the permission."""
    trusted = msgspec.structs.replace(SMALL, trust=TRUSTED)
    assert joined({"eu": SMALL}, SUBNETS)["eu"].region.insecure
    assert not joined({"eu": trusted}, SUBNETS)["eu"].region.insecure


def test_a_region_needs_a_control_plane() -> None:
    """Without one there is no address that other regions could be given."""
    with pytest.raises(AssertionError, match=r"control\.replicas = 0"):
        joined({"eu": configure(control={"replicas": 0})}, SUBNETS)
