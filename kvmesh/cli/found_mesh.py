"""The mesh that a command works on: its configuration, its Redis, and mesh.json if it runs here."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvmesh.cli.mesh_file import MeshFile, NoMesh, read_mesh
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
        listed = read_mesh(data_dir_of(settings, data_dir))
        if path is None:
            settings = settings_of(listed)
    return FoundMesh(settings, redis_url_of(listed, named, is_file_given=path is not None), listed)
