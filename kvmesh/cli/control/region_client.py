"""The control plane of a region as a command dials it: at the addresses of [regions.NAME] control, without Redis.

A region that lost its Redis is dialled as well, and so is one whose Redis this machine cannot reach.
"""

from __future__ import annotations

from functools import partial

from kvmesh.bad_option import BadOption
from kvmesh.cli.control.client import ControlClient
from kvmesh.cli.control.failures import away
from kvmesh.cli.found_mesh import FoundMesh


def own_region(mesh: FoundMesh) -> str:
    """Return the region of the mesh of a command. Raises BadOption if the mesh has no regions."""
    if not mesh.config.regions and mesh.listed is None:
        raise BadOption(
            "No mesh with regions runs in this folder: start one with `kvmesh up --regions eu,us`, or name the "
            "configuration of a region by --config, such as .kvmesh/eu.toml."
        )
    if not mesh.config.regions:
        raise BadOption(
            "This mesh has no regions: start one with `kvmesh up --regions eu,us`, or name a configuration with tables "
            "[regions.NAME] by --config."
        )
    return mesh.config.region.name


def known_region(mesh: FoundMesh, field: str, name: str) -> str:
    """Return `name`, an argument or the option `field`. Raises BadOption with the value and the configured names."""
    own_region(mesh)
    if name not in mesh.config.regions:
        raise BadOption(
            f'{field} = "{name}" is unknown: allowed are {", ".join(sorted(mesh.config.regions))}.'
        )
    return name


def client_of(mesh: FoundMesh, region: str) -> ControlClient:
    """Return the client of the control plane of a configured region."""
    others = sorted(set(mesh.config.regions) - {region})
    return ControlClient(mesh, mesh.config.regions[region].control, partial(away, region, others))
