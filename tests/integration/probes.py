"""HTTP probes of the metrics port of real processes, as an orchestrator sends them."""

from __future__ import annotations

import asyncio
import http.client
import re
from pathlib import Path

from tests.integration.harness import until

READY = (200, "ready\n")


def metrics_address(log: Path) -> str:
    """Return the metrics address in the last line of a log that says that the process is ready."""
    found: list[str] = re.findall(r'"metrics_address": "([^"]+)"', log.read_text())
    return found[-1]


async def probed(address: str, path: str) -> tuple[int, str]:
    """Return the status and the text of a page. Raises OSError if nothing listens."""
    return await asyncio.to_thread(_probed, address, path)


async def until_probed(address: str, path: str, wanted: tuple[int, str]) -> None:
    """Wait until a page has this status and this text."""

    async def is_there() -> bool:
        return await probed(address, path) == wanted

    await until(is_there, 10, f"{path} of {address} is {wanted}")


async def check_pages(address: str, role: str, ready: tuple[int, str] = READY) -> None:
    """Check every page of a process; `ready` is what /readyz answers."""
    status, text = await probed(address, "/metrics")
    assert status == 200 and f"\nkvmesh_{role}_process_open_fds " in text
    assert await probed(address, "/healthz") == (200, "ok\n")
    assert await probed(address, "/readyz") == ready
    for path in ("/", "/nonsense"):
        assert await probed(address, path) == (404, "the paths are /metrics, /healthz and /readyz\n")


def _probed(address: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=20)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()
