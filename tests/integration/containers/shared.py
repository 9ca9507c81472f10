"""One mesh for many tests: as good as new for each of them, and a new one after a test that broke it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from kvmesh.config import MeshConfig
from tests.integration.containers.faults import Faults
from tests.integration.containers.mesh import ContainerMesh, Options

IDLE_S_MAX: Final = 20.0


class SharedMesh:
    """Lends its mesh to one user at a time. Starts it for the first; starts another when a user left it broken."""

    def __init__(self, config: MeshConfig, folder: Path, options: Options | None = None) -> None:
        """Build it; nothing runs yet. Each mesh writes its logs into a folder of its own below `folder`."""
        self._config = config
        self._folder = folder
        self._options = options
        self._mesh: ContainerMesh | None = None
        self.built_count = 0

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[tuple[ContainerMesh, Faults]]:
        """Yield the mesh, whole and idle. Afterwards take back every fault and check that it is so again.

        A failure inside the block, a part that ended by itself or that does not come back, or anything
        still held ends this mesh. Such a violation of an otherwise good user raises AssertionError.
        """
        mesh = self._mesh or await self._build()
        faults = Faults(mesh)
        try:
            yield mesh, faults
            fallen = await faults.clear()
            assert not fallen, f"ended by themselves, with these exit statuses: {fallen}"
            await mesh.placeable()
            await mesh.idle(IDLE_S_MAX)
            await mesh.close_channels()  # another user may run on another event loop
            await faults.close()
        except BaseException:
            await self.close()
            raise

    async def _build(self) -> ContainerMesh:
        self.built_count += 1
        folder = self._folder / f"mesh-{self.built_count}"
        folder.mkdir(parents=True)
        self._mesh = ContainerMesh(self._config, folder, self._options)
        try:
            await self._mesh.start()
        except BaseException:
            await self.close()
            raise
        return self._mesh

    async def close(self) -> None:
        """Remove the mesh, if there is one; the next lease builds another."""
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            await mesh.stop()
