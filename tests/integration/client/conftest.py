"""The mesh whose frontends clients lose."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.harness import Mesh, configure, running_mesh


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    """Two frontends before one router and one replica of each role."""
    config = configure(
        engine={"arithmetic": "hashed", "step_s": 0.01},
        frontend={"replicas": 2},
        prefill={"replicas": 1},
        decode={"replicas": 1},
    )
    async with running_mesh(config, tmp_path) as running:
        yield running
