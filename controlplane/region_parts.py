"""Builds the parts of a control process that belong to regions, from the configuration."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import msgspec

from controlplane.region_control import RegionControl, RegionNames
from controlplane.regions.settings import RegionSettings
from controlplane.regions.shares import Limits
from kvmesh.config import MeshConfig
from kvmesh.region_sections import shares_of


def region_control_of(
    config: MeshConfig, wall: Callable[[], float], settings: RegionSettings | None = None
) -> RegionControl | None:
    """Return the regions of `config`. None: a mesh without regions."""
    if not config.regions:
        return None
    names = RegionNames(
        config.region.name,
        shares_of(config.regions),
        Limits(config.region.limits),
        tenants_digest(config),
    )
    return RegionControl(names, wall, settings)


def peers_of(config: MeshConfig) -> Mapping[str, Sequence[str]]:
    """Return the control addresses of each other region."""
    return {name: table.control for name, table in config.regions.items() if name != config.region.name}


def is_seeded(config: MeshConfig) -> bool:
    """True if hot prompts of other regions are asked for, and replayed here."""
    return config.warm_up.mode == "full" and config.warm_up.seeding != "none"


def tenants_digest(config: MeshConfig) -> bytes:
    """Return the SHA-256 of what regions must agree on about tenants: residency, limits and disabled marks."""
    tenants = {
        name: (sorted(each.regions), each.disabled, each.organisation, msgspec.to_builtins(each.limit()))
        for name, each in sorted(config.tenants.items())
    }
    organisations = {
        name: msgspec.to_builtins(each.limit()) for name, each in sorted(config.organisations.items())
    }
    return hashlib.sha256(msgspec.json.encode((tenants, organisations))).digest()
