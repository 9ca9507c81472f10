"""Three models in real tritonservers, shared by all tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.integration.engine.servers import Client, Server
from tests.integration.engine_tensorrt_llm.fake_servers import launch, write


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server, Server]]:
    """A prefill and a decode engine, and one with another data type and a tiny event buffer. Killed afterwards.

    Nothing that was not recorded of TensorRT-LLM was touched.
    """
    root = tmp_path_factory.mktemp("trtllm")
    adapter = root / "adapter"
    adapter.mkdir()
    loras = {"model_version": "fake-1", "loras": {7: {"name": "legal", "path": str(adapter)}}}
    configs = (
        write(root / "p", {"records": True}),
        write(root / "d", {"records": True, "step_s": 0.002}, enable_lora=True, kvmesh=loras),
        write(
            root / "o",
            {"error_token": 77, "fatal_token": 78, "end_probability": 0.3, "end_token": 2},
            dtype="float16",
            kv_cache_config__event_buffer_max_size=3,
            cache_transceiver_config__backend="NIXL",
        ),
    )
    started = [launch(config) for config in configs]
    try:
        for server in started:
            server.wait_ready()
        yield started[0], started[1], started[2]
        touched = [path for path in root.glob("*/model/violations") if path.read_text(encoding="utf-8")]
        assert [path.read_text(encoding="utf-8") for path in touched] == []
    finally:
        for server in started:
            server.kill()


async def _client(server: Server) -> AsyncIterator[Client]:
    client = Client(server.grpc)
    yield client
    await client.close()


@pytest_asyncio.fixture
async def prefill(servers: tuple[Server, Server, Server]) -> AsyncIterator[Client]:
    """A client of the engine without simulated costs."""
    async for client in _client(servers[0]):
        yield client


@pytest_asyncio.fixture
async def decode(servers: tuple[Server, Server, Server]) -> AsyncIterator[Client]:
    """A client of the engine with steps of 2 ms and an adapter."""
    async for client in _client(servers[1]):
        yield client


@pytest_asyncio.fixture
async def other(servers: tuple[Server, Server, Server]) -> AsyncIterator[Client]:
    """A client of the engine with another data type."""
    async for client in _client(servers[2]):
        yield client
