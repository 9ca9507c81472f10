"""A mesh of hashed engines at a GPU-like pace, for tests that break it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.harness import Mesh, configure, running_mesh

STEP_S = 0.02


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
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
        router={"snapshot_interval_s": 2.0},
        frontend={"default_deadline_s": 120.0},
    )
    async with running_mesh(config, tmp_path) as started:
        yield started
