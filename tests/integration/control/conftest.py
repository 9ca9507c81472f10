"""Fixtures of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.router.conftest import RedisServer


@pytest.fixture
async def own_redis(tmp_path: Path) -> AsyncIterator[RedisServer]:
    """A Redis that the test may stop and start."""
    folder = tmp_path / "redis"
    folder.mkdir()
    server = RedisServer(folder)
    await server.start()
    yield server
    server.stop()


@pytest.fixture
def url(own_redis: RedisServer) -> str:
    """URL of a Redis of the test."""
    return own_redis.url
