"""The option `kvmesh up --regions eu,us`: its names, and the configuration of each region on this machine. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from kvmesh.bad_option import BadOption
from kvmesh.config import ConfigError, MeshConfig
from kvmesh.config_keys import NAME, NAME_WORDS
from kvmesh.region_sections import REGIONS_MAX, RegionTable

RESERVED: Final = ("engines", "logs", "state")
"""Folders that a mesh without regions has in the data folder, where each region has a folder with its name."""

PORT_STEP: Final = 100
"""Distance of the frontends' ports between two regions."""


def region_names(text: str) -> tuple[str, ...]:
    """Return the names in "eu,us". Raises BadOption with the value and the allowed range."""
    names = tuple(name.strip() for name in text.split(","))
    if not 2 <= len(names) <= REGIONS_MAX:
        raise BadOption(
            f'--regions = "{text}" has {len(names)} {"name" if len(names) == 1 else "names"}: '
            f"allowed are 2 to {REGIONS_MAX} names, separated by commas, such as eu,us."
        )
    for at, name in enumerate(names):
        if not re.fullmatch(NAME, name):
            raise BadOption(f'--regions = "{text}" has the invalid name "{name}": allowed are {NAME_WORDS}.')
        if name in RESERVED:
            raise BadOption(
                f'--regions = "{text}" has the name "{name}", which is a folder of the data folder: '
                f"allowed are names other than {', '.join(RESERVED)}."
            )
        if name in names[:at]:
            raise BadOption(f'--regions = "{text}" names the region {name} twice: once is allowed.')
    return names


def check_names(config: MeshConfig, names: Sequence[str]) -> None:
    """Raise ConfigError unless the configuration has no tables of regions, or a table for each of `names` alone."""
    if config.regions and set(config.regions) != set(names):
        raise ConfigError(
            f"--regions = {','.join(names)} differs from the tables [regions.NAME] of the configuration: allowed are "
            f"{','.join(config.regions)}, or a configuration without these tables."
        )


def with_regions(
    config: MeshConfig, names: Sequence[str], control: Mapping[str, Sequence[str]]
) -> dict[str, MeshConfig]:
    """Return the configuration of each region. `control`: addresses of each region's control plane.

    Shares of the tables in `config` are kept. Raises ConfigError.
    """
    tables = {
        name: RegionTable(control=tuple(control[name]), share=config.regions[name].share)
        if name in config.regions
        else RegionTable(control=tuple(control[name]))
        for name in names
    }
    made = {
        name: replace(
            config,
            region=replace(config.region, name=name),
            regions=tables,
            control=replace(config.control, replicas=control_count(config)),
            frontend=replace(
                config.frontend,
                port=_port(config.frontend.port, at),
                http_port=_port(config.frontend.http_port, at),
            ),
        )
        for at, name in enumerate(names)
    }
    _check_ports(config, made)
    return made


def _check_ports(config: MeshConfig, made: Mapping[str, MeshConfig]) -> None:
    """Raise ConfigError if two frontends would have one port, of gRPC or of HTTP."""
    taken: dict[int, str] = {}
    for name, each in made.items():
        for key in ("port", "http_port"):
            first = getattr(each.frontend, key)
            for port in range(first, first + each.frontend.replicas if first else 0):
                if port in taken:
                    raise ConfigError(
                        f"frontend.{key} = {getattr(config.frontend, key)} gives region {name} the port {port}, which is "
                        f"frontend.{taken[port]}: regions are {PORT_STEP} ports apart. Allowed is 0, or another port."
                    )
                taken[port] = f"{key} of region {name}"


def control_count(config: MeshConfig) -> int:
    """Return the number of control processes of each region: regions federate by their control planes."""
    return max(1, config.control.replicas)


def _port(first: int, at: int) -> int:
    return first + PORT_STEP * at if first else 0
