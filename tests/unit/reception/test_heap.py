"""What a flood left is given back, also if it came before the server's `run`."""

from __future__ import annotations

import asyncio
import ctypes

from kvmesh.metrics import resident_bytes
from kvmesh.server import MeshServer

MB = 1 << 20
BLOCK_BYTES = 32 << 10
BLOCKS = 2_048
"""64 MB. Smaller than what the C library gives back by itself."""
WAIT_S = 30.0


async def test_what_grew_between_listen_and_run_is_given_back() -> None:
    """A port that listens is flooded before the process says that it is ready."""
    server = MeshServer("frontend", "frontend-0", ("kvmesh.inference.v1.InferenceService",))
    await server.listen("127.0.0.1:0")
    idle = resident_bytes()
    pin = leave_freed_memory()
    assert resident_bytes() - idle > 48 * MB
    running = asyncio.create_task(server.run(drained))
    try:
        async with asyncio.timeout(WAIT_S):
            while resident_bytes() - idle > 16 * MB:
                await asyncio.sleep(0.02)
    finally:
        server.stop()
        await running
        libc().free(pin)


async def drained() -> None:
    """There is nothing to drain."""


def libc() -> ctypes.CDLL:
    """Return the C library."""
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    return library


def leave_freed_memory() -> ctypes.c_void_p:
    """Free many blocks below one that stays. Returns the one that stays."""
    library = libc()
    blocks = [library.malloc(BLOCK_BYTES) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    pin = ctypes.c_void_p(library.malloc(BLOCK_BYTES))
    for block in blocks:
        library.free(block)
    return pin
