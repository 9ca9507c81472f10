"""Routers in this process, without members and Redis, with prompts that a test puts into their record."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvmesh import blocks
from kvmesh.advertise import AS_LISTENED
from kvmesh.attach.frames import pack_ids
from kvmesh.config import MeshConfig
from kvmesh.service_options import ServiceOptions
from services.router.main import Router

NO_REDIS = "redis://127.0.0.1:1"


@asynccontextmanager
async def hot_router(config: MeshConfig, name: str = "router-0") -> AsyncIterator[Router]:
    """Serve a router's calls."""
    router = Router(ServiceOptions(config, name, "127.0.0.1:0", NO_REDIS, 0, AS_LISTENED))
    await router.server.listen("127.0.0.1:0")
    try:
        yield router
    finally:
        await router.server.grpc.stop(0)
        await router.close()


def remember(router: Router, token_ids: Sequence[int], tenant: str = "", session: str = "") -> bytes:
    """Record a prompt, as at a release now. Return its tokens."""
    packed, engine = pack_ids(token_ids), router.options.config.engine
    prompts = router.release_recorder.prompts
    router.release_recorder.shapes.add(len(token_ids), 3, router.clock.now_s())
    prompts.add(
        tenant,
        session,
        f"request-{len(prompts)}",
        packed,
        blocks.pack(blocks.chain(packed, engine.block_tokens, router.pool.version.name)),
        router.clock.now_s(),
    )
    return packed
