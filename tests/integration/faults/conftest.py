"""A mesh of hashed engines at a GPU-like pace, for tests with faults."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.integration.harness import Mesh, configure
from tests.integration.lent_mesh import LentMesh, lent_mesh

STEP_S = 0.02


@pytest.fixture(scope="module")
def lent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LentMesh]:
    """Two prefill and two decode replicas that make 50 tokens/s per stream, and a router and a frontend."""
    config = configure(
        engine={
            "arithmetic": "hashed",
            "kv_blocks": 512,
            "prefill_kv_blocks": 512,
            "max_sequence_tokens": 4096,
            "step_s": STEP_S,
            "prefill_token_s": 0.0001,
        },
        # Long enough for the restart of a process on a machine that has much else to do.
        decode={"detached_s": 10.0},
        router={"snapshot_interval_s": 2.0},
        frontend={"default_deadline_s": 120.0},
        trust={"networks": ("127.0.0.0/8",)},
    )
    with lent_mesh(config, tmp_path_factory.mktemp("mesh")) as made:
        yield made


@pytest.fixture
async def mesh(lent: LentMesh) -> AsyncIterator[Mesh]:
    """The module's mesh, complete and idle."""
    async with lent.lease() as mesh:
        yield mesh
