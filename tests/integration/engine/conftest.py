"""Two hashed engines in real tritonservers, shared by all tests of this folder."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.integration.engine.servers import Client, Server, launch

BLOCKS, BLOCK_TOKENS = 96, 8
OPTIONS = (
    f"--kv-blocks={BLOCKS}",
    f"--block-tokens={BLOCK_TOKENS}",
    "--max-step-tokens=64",
    "--max-running=16",
    "--handoff-timeout-s=1.5",
)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """A prefill and a decode engine, small enough to evict, killed afterwards."""
    directory = tmp_path_factory.mktemp("engines")
    started = [
        launch(directory / name, *OPTIONS, f"--step-s={step}") for name, step in (("p", 0.0), ("d", 0.002))
    ]
    try:
        for server in started:
            server.wait_ready()
        yield started[0], started[1]
    finally:
        for server in started:
            server.kill()


@pytest_asyncio.fixture
async def prefill(servers: tuple[Server, Server]) -> AsyncIterator[Client]:
    """A client of the engine without simulated costs."""
    client = Client(servers[0].grpc)
    yield client
    await client.close()


@pytest_asyncio.fixture
async def decode(servers: tuple[Server, Server]) -> AsyncIterator[Client]:
    """A client of the engine with steps of 2 ms."""
    client = Client(servers[1].grpc)
    yield client
    await client.close()
