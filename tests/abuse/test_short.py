"""The short form of some attacks on one mesh of processes, no times judged. `make abuse` runs all attacks, whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from tests.abuse.attack import Attack
from tests.abuse.catalogue import ATTACKS
from tests.abuse.runner import OVERTIME_S, Runner, running

SEED: Final = 1
CHOSEN: Final = (
    *(
        "duplicate-names",
        "lying-engine",
        "malformed-frames",
        "http-junk",
        "closed-windows",
        "junk-in-redis",
        "rapid-reset",
    ),
)
"""Attacks on state: of names, engines, frames, requests over HTTP, windows, Redis and streams."""
BY_NAME: Final = {one.name: one for one in ATTACKS}

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.timeout(2 * OVERTIME_S + 120),
    pytest.mark.asyncio(loop_scope="module"),
]


class Meshes:
    """Lends a mesh, and a new one after an attack that the mesh did not withstand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = AsyncExitStack()
        self._runner: Runner | None = None
        self._count = 0

    async def runner(self) -> Runner:
        """Return the runner of a whole mesh."""
        if self._runner is None or not self._runner.is_whole:
            await self._stack.aclose()
            self._count += 1
            opening = running(self.folder / f"mesh-{self._count}", SEED, is_short=True)
            self._runner = await self._stack.enter_async_context(opening)
        return self._runner

    async def close(self) -> None:
        """End the mesh."""
        await self._stack.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def meshes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Meshes]:
    """One mesh for all attacks, as long as it withstands them."""
    made = Meshes(tmp_path_factory.mktemp("abuse"))
    yield made
    await made.close()


@pytest.mark.parametrize("attack", [BY_NAME[name] for name in CHOSEN], ids=lambda attack: attack.name)
async def test_a_mesh_withstands(meshes: Meshes, attack: Attack) -> None:
    """Legitimate calls get the right tokens, memory stays in its bounds, and no state is left behind."""
    row = await (await meshes.runner()).run(attack)
    print(row)
    assert not row.violations, (
        "\n".join(row.violations)
        + f"\nagain: python -m tests.abuse --short --only {attack.name} --seed {SEED}\nlogs: {meshes.folder}"
    )
    assert sum(row.did.values()), "the attack did nothing: it proves nothing"
