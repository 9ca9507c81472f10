"""The mesh that a command works on: its configuration, its Redis, and mesh.json if it runs here.

`kvmesh up --regions` runs several meshes in one data folder. A command without another --data-dir works on the first region
that runs, and says so on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvmesh.cli.mesh_file import MeshFile, NoMesh, read_meshes
from kvmesh.cli.options import data_dir_of, settings_given, settings_of
from kvmesh.cli.redis_choice import named_redis, redis_url_of
from kvmesh.config import MeshConfig


@dataclass(frozen=True, slots=True)
class FoundMesh:
    """See the module."""

    config: MeshConfig
    redis_url: str
    listed: MeshFile | None
    """The mesh that runs here. None: it runs elsewhere."""

    def addresses_of(self, role: str) -> tuple[str, ...]:
        """Return the addresses in mesh.json of all processes of `role`."""
        return tuple(self.listed.addresses_of(role)) if self.listed is not None else ()


def found_mesh(path: Path | None, data_dir: Path | None, environment: Mapping[str, str]) -> FoundMesh:
    """Return the mesh of --config and --data-dir, else the mesh that runs here. Raises BadOption and ConfigError."""
    settings = settings_given(path)
    named = named_redis(settings, environment)
    listed = None
    with suppress(NoMesh):
        listed = first_mesh(data_dir_of(settings, data_dir))
        if path is None:
            settings = settings_of(listed)
    return FoundMesh(settings, redis_url_of(listed, named, is_file_given=path is not None), listed)


def found_regions(path: Path | None, data_dir: Path | None) -> FoundMesh:
    """Return the mesh for a command about regions, without a Redis: the configuration has the control planes to dial.

    Tables of regions come from --config, else from the mesh that runs here. Raises ConfigError.
    """
    settings, listed = settings_given(path), None
    with suppress(NoMesh):
        listed = next(iter(read_meshes(data_dir_of(settings, data_dir)).values()))
        if not settings.regions:
            settings = settings_of(listed)
    return FoundMesh(settings, "", listed)


def first_mesh(data_dir: Path) -> MeshFile:
    """Return the mesh that runs with `data_dir`, of several regions the first, and say which one. Raises NoMesh."""
    meshes = read_meshes(data_dir)
    region, mesh = next(iter(meshes.items()))
    if len(meshes) > 1:
        others = ", ".join(f"--data-dir {shown_folder(data_dir / name)}" for name in meshes if name != region)
        sys.stderr.write(f"Region {region}. Others: {others}.\n")
    return mesh


def shown_folder(folder: Path) -> str:
    """Return a folder as the operator types it."""
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)
