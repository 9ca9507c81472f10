"""A process that grows between its server's `listen` and `run`, and has freed that memory before `run`.

Exit status 0: the memory was returned to the kernel. It needs a new process: an older one has free memory for the blocks.
"""

from __future__ import annotations

import asyncio
import ctypes

from kvmesh.metrics import resident_bytes
from kvmesh.server import MeshServer

MB = 1 << 20
BLOCK_BYTES = 32 << 10
BLOCKS = 2_048
"""64 MB. Each block is smaller than the size that the C library returns by itself."""


async def main() -> None:
    """Return once the memory is returned to the kernel."""
    server = MeshServer("frontend", "frontend-0", ("kvmesh.inference.v1.InferenceService",))
    await server.listen("127.0.0.1:0")
    idle = resident_bytes()
    leave_freed_memory()
    assert resident_bytes() - idle > 48 * MB, "the blocks were not taken from the kernel"
    running = asyncio.create_task(server.run(drained))
    while not running.done() and resident_bytes() - idle > 16 * MB:
        await asyncio.sleep(0.02)
    server.stop()
    await running


async def drained() -> None:
    """There is nothing to drain."""


def leave_freed_memory() -> None:
    """Free many blocks below a block that stays."""
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    blocks = [library.malloc(BLOCK_BYTES) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    library.malloc(BLOCK_BYTES)
    for block in blocks:
        library.free(block)


if __name__ == "__main__":
    asyncio.run(main())
