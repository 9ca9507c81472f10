"""One mesh of processes for many tests: whole and idle for each of them, and a new one after a test that broke it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

from kvmesh.config import MeshConfig
from tests.integration.harness import Mesh

IDLE_S_MAX: Final = 20.0


class LentMesh:
    """Lends its mesh to one user at a time. Starts it for the first; starts another when a user left it broken."""

    def __init__(self, config: MeshConfig, folder: Path, engine_options: Sequence[str] = ()) -> None:
        """Build it; nothing runs yet. Each mesh writes its logs into a folder of its own below `folder`."""
        self._config = config
        self._folder = folder
        self._engine_options = engine_options
        self._mesh: Mesh | None = None
        self._built_count = 0

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Mesh]:
        """Yield the mesh, whole and idle. Afterwards start again what the user ended, and check that it is so again.

        A part that ended by itself or does not come back, or anything still held, ends this mesh and raises
        AssertionError.
        """
        mesh = self._mesh or await self._build()
        try:
            yield mesh
            fallen = {name: part.tail() for name, part in mesh.parts.items() if part.has_fallen}
            assert not fallen, f"ended by themselves: {fallen}"
            ended = [name for name, part in mesh.parts.items() if not part.is_running]
            if ended:
                await mesh.start(*ended)
            await mesh.placeable()
            await mesh.idle(IDLE_S_MAX)
            await mesh.close_channels()  # the next user runs on another event loop
        except BaseException:
            await self.close()
            raise

    async def _build(self) -> Mesh:
        self._built_count += 1
        folder = self._folder / f"mesh-{self._built_count}"
        folder.mkdir(parents=True)
        self._mesh = Mesh(self._config, folder, self._engine_options)
        try:
            await self._mesh.start()
        except BaseException:
            await self.close()
            raise
        return self._mesh

    async def close(self) -> None:
        """End the mesh, if there is one; the next lease builds another."""
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            await mesh.stop()


@contextmanager
def lent_mesh(config: MeshConfig, folder: Path, engine_options: Sequence[str] = ()) -> Iterator[LentMesh]:
    """Lend a mesh and end it, outside of any event loop: for fixtures of a wider scope than a test's."""
    made = LentMesh(config, folder, engine_options)
    try:
        yield made
    finally:
        asyncio.run(made.close())
