"""The mesh of the tests in which clients lose a frontend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.integration.harness import Mesh, configure
from tests.integration.lent_mesh import LentMesh, lent_mesh


@pytest.fixture(scope="module")
def lent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LentMesh]:
    """Two frontends before one router and one replica of each role."""
    config = configure(
        engine={"arithmetic": "hashed", "step_s": 0.01},
        frontend={"replicas": 2},
        prefill={"replicas": 1},
        decode={"replicas": 1},
    )
    with lent_mesh(config, tmp_path_factory.mktemp("mesh")) as made:
        yield made


@pytest.fixture
async def mesh(lent: LentMesh) -> AsyncIterator[Mesh]:
    """The module's mesh, with all processes running and idle."""
    async with lent.lease() as mesh:
        yield mesh
