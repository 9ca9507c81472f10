"""Memory of a process after refused calls."""

from __future__ import annotations

import gc
from typing import Any

import grpc
import pytest

from kvmesh.errors import MeshError
from kvmesh.server import MeshServer

METHOD = "Refuse"
SERVICE = "kvmesh.test.v1.RefusingService"
COUNT = 20


async def test_a_refused_call_is_gone_without_the_cycle_collector() -> None:
    """Its status and frames are released, and gRPC's memory with them, although grpcio keeps the abort beside the call."""

    async def refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        raise MeshError("LIVE_REQUESTS_FULL", "full", retry_after_s=1.0)

    server = MeshServer("frontend", "frontend-0", [])
    handlers = {METHOD: grpc.unary_unary_rpc_method_handler(refuse)}
    server.grpc.add_registered_method_handlers(SERVICE, handlers)  # type: ignore[attr-defined]  # stubs lack it
    address = await server.listen("127.0.0.1:0")
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            for _ in range(COUNT):
                with pytest.raises(grpc.aio.AioRpcError):
                    await channel.unary_unary(f"/{SERVICE}/{METHOD}", None, None)(b"")
        await server.grpc.stop(0)
        gc.collect()
        left = [one for one in gc.garbage if isinstance(one, (MeshError, grpc.aio.AbortError))]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left
