"""A reference engine and two impersonated stock backends with the same arithmetic, in real tritonservers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvmesh.ports import free_ports
from tests.integration.engine.servers import Server, launch

STOCK = ("tests.fakes.stock_backend.serve",)
BLOCKS, BLOCK_TOKENS, LONGEST, END_TOKEN, VOCABULARY = 256, 16, 512, 1, 4096
OPTIONS = (
    f"--kv-blocks={BLOCKS}",
    f"--block-tokens={BLOCK_TOKENS}",
    f"--max-sequence-tokens={LONGEST}",
    f"--vocab-size={VOCABULARY}",
    f"--end-token={END_TOKEN}",
    "--end-probability=0.04",
    "--salt=kvmesh-1",
    "--step-s=0.002",
)


@dataclass
class Servers:
    """`prefill` hangs at a handoff of another server, `decode` fails."""

    reference: Server
    prefill: Server
    decode: Server


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The servers, killed afterwards. Both stock ones have the same port for /metrics."""
    folder: Path = tmp_path_factory.mktemp("stock")
    (port,) = free_ports("127.0.0.1", 1)
    started = Servers(
        launch(folder / "reference", "--model-version=kvmesh-1", *OPTIONS),
        launch(folder / "prefill", "--handoffs=hang", *OPTIONS, module=STOCK, metrics_port=port),
        launch(folder / "decode", "--handoffs=fail", *OPTIONS, module=STOCK, metrics_port=port),
    )
    every = (started.reference, started.prefill, started.decode)
    try:
        for server in every:
            server.wait_ready()
        yield started
    finally:
        for server in every:
            server.kill()
