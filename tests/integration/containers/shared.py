"""One mesh of containers shared by many tests, and its fault injector."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvmesh.config import MeshConfig
from tests.integration.containers.faults import Faults
from tests.integration.containers.mesh import ContainerMesh, Options
from tests.integration.lent_mesh import Lender


class SharedMesh(Lender[ContainerMesh, tuple[ContainerMesh, Faults]]):
    """Lends a mesh of containers, and removes every fault afterwards."""

    def __init__(self, config: MeshConfig, folder: Path, options: Options | None = None) -> None:
        super().__init__(folder)
        self._config = config
        self._options = options

    def _new(self, folder: Path) -> ContainerMesh:
        return ContainerMesh(self._config, folder, self._options)

    @asynccontextmanager
    async def _lent(self, mesh: ContainerMesh) -> AsyncIterator[tuple[ContainerMesh, Faults]]:
        faults = Faults(mesh)
        yield mesh, faults
        fallen = await faults.clear()
        assert not fallen, f"ended by themselves, with these exit statuses: {fallen}"
        await faults.close()
