"""One mesh for many tests: complete and idle for each of them, and replaced after a test that broke it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from kvmesh.config import MeshConfig
from tests.integration.harness import Mesh
from tests.integration.live_mesh import LiveMesh

IDLE_S_MAX: Final = 20.0

MeshT = TypeVar("MeshT", bound=LiveMesh[Any])
LentT = TypeVar("LentT")


class Lender(ABC, Generic[MeshT, LentT]):
    """Lends its mesh to one user at a time. The first lease starts a mesh; a broken mesh is replaced for the next
    lease.
    """

    def __init__(self, folder: Path) -> None:
        """Set up without starting any process. Each mesh has its logs in a folder of its own below `folder`."""
        self._folder = folder
        self._mesh: MeshT | None = None
        self.built_count = 0

    @abstractmethod
    def _new(self, folder: Path) -> MeshT:
        """Return a mesh with its logs in `folder`; none of its processes run."""

    @abstractmethod
    def _lent(self, mesh: MeshT) -> AbstractAsyncContextManager[LentT]:
        """Yield the object that a user gets; afterwards undo the user's changes to the parts.

        Raises AssertionError if a part has ended by itself or cannot be restored.
        """

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[LentT]:
        """Yield the mesh, complete and idle. Afterwards restore it, and check that it is complete and idle again.

        The mesh is ended after a failure inside the block, or if a part has ended by itself or cannot be restored, or
        if any request is still held. Such a violation raises AssertionError for a user without another failure.
        """
        mesh = self._mesh or await self._build()
        try:
            async with self._lent(mesh) as lent:
                yield lent
            await mesh.placeable()
            await mesh.idle(IDLE_S_MAX)
            await mesh.close_channels()  # the next user may run on another event loop
        except BaseException:
            await self.close()
            raise

    async def _build(self) -> MeshT:
        self.built_count += 1
        folder = self._folder / f"mesh-{self.built_count}"
        folder.mkdir(parents=True)
        self._mesh = mesh = self._new(folder)
        try:
            await mesh.start()
        except BaseException:
            await self.close()
            raise
        return mesh

    async def close(self) -> None:
        """End the mesh, if there is one; the next lease starts another."""
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            await mesh.stop()


class LentMesh(Lender[Mesh, Mesh]):
    """Lends a mesh of processes, and restarts those that its user ended."""

    def __init__(self, config: MeshConfig, folder: Path, engine_options: Sequence[str] = ()) -> None:
        super().__init__(folder)
        self._config = config
        self._engine_options = engine_options

    def _new(self, folder: Path) -> Mesh:
        return Mesh(self._config, folder, self._engine_options)

    @asynccontextmanager
    async def _lent(self, mesh: Mesh) -> AsyncIterator[Mesh]:
        yield mesh
        fallen = {name: part.tail() for name, part in mesh.parts.items() if part.has_fallen}
        assert not fallen, f"ended by themselves: {fallen}"
        ended = [name for name, part in mesh.parts.items() if not part.is_running]
        if ended:
            await mesh.start(*ended)


@contextmanager
def lent_mesh(config: MeshConfig, folder: Path, engine_options: Sequence[str] = ()) -> Iterator[LentMesh]:
    """Lend a mesh and end it, outside of any event loop: for fixtures with a wider scope than a test."""
    made = LentMesh(config, folder, engine_options)
    try:
        yield made
    finally:
        asyncio.run(made.close())
