"""A small mesh whose engines offer guided output, which those of the site do not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.clients.openai_driver import Server
from tests.integration.harness import configure, running_mesh


@asynccontextmanager
async def guided_mesh(folder: Path) -> AsyncIterator[Server]:
    """Start the mesh with its logs in `folder`, and end it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = configure(
        engine={"arithmetic": "transformer"},
        frontend={"replicas": 1},
        prefill={"replicas": 1},
        decode={"replicas": 1},
    )
    async with running_mesh(config, folder) as mesh:
        yield Server(f"http://{mesh.parts['frontend-0'].http_address}/v1", config.mesh.model)
