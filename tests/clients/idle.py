"""Memory that idle connections take of a frontend."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Final

import psutil

from tests.raw_http2 import RawConnection

CONNECTIONS: Final = 10_000
AT_ONCE: Final = 50
"""Connections that are opened at once."""

CONNECTION_KB_MAX: Final = 40.0
"""Most memory of an idle connection. Some 20 KB were measured: the codec, its HPACK tables and the transport."""


async def connection_kb(address: str, frontend: psutil.Process, connections: int = CONNECTIONS) -> float:
    """Open idle connections, close them, and return the resident memory that each took, in KB.

    Each has sent its preface, has acknowledged the settings, and had its ping answered.
    """
    async with AsyncExitStack() as stack:

        async def connect() -> None:
            connection = await stack.enter_async_context(RawConnection.connect(address))
            await connection.ping()

        before_bytes = frontend.memory_info().rss
        for first in range(0, connections, AT_ONCE):
            await asyncio.gather(*(connect() for _ in range(min(AT_ONCE, connections - first))))
        return float(frontend.memory_info().rss - before_bytes) / connections / 1024
