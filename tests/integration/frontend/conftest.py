"""A frontend in this process, on a free port, attached to scripted routers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import grpc
import pytest

from kvmesh import config as configuration
from kvmesh.advertise import AS_LISTENED
from kvmesh.inference.v1 import inference_pb2_grpc
from kvmesh.membership.member import Member
from kvmesh.ports import free_ports
from kvmesh.service_options import ServiceOptions
from services.frontend.assembly import Frontend
from services.frontend.surface import served_versions
from tests.integration.frontend.scripted_router import Pool, serving_router
from tests.patience import patience

CONFIG = configuration.MeshConfig()

ANSWER_S = 10.0
"""Timeout for a response of Redis in these tests: they do not test the fallback without Redis on a busy machine."""


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 5.0) -> None:
    """Wait until `condition` is true. Raises AssertionError naming `what`."""
    try:
        async with patience(timeout_s):
            while not condition():
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s:g} s: {what}") from None


@dataclass
class Serving:
    """A running frontend, and a stub of it."""

    frontend: Frontend
    address: str
    channel: grpc.aio.Channel
    stub: Any
    http_address: str

    def route(self, routers: Sequence[tuple[str, str]]) -> None:
        """Give the frontend the routers' names and addresses, as the membership does."""
        self.frontend.on_members(
            [
                Member(
                    process_id=name,
                    role="router",
                    address=address,
                    boot_id="1",
                    model_version=CONFIG.engine.salt,
                    block_tokens=CONFIG.engine.block_tokens,
                )
                for name, address in routers
            ]
        )

    async def until_up(self, count: int) -> None:
        """Wait until `count` routers are attached."""
        core = self.frontend.core
        await until(lambda: sum(peer.link.is_up for peer in core.peers) == count, f"{count} routers up")

    async def until_empty(self, timeout_s: float = 5.0) -> None:
        """Wait until no request has any state left."""
        core = self.frontend.core
        await until(
            lambda: (
                not core.admitted.serving
                and not core.admitted.leaving
                and not any(peer.slots for peer in core.peers)
                and core.next_wake_s() is None
            ),
            f"empty: {core.admitted}",
            timeout_s,
        )


@asynccontextmanager
async def serving_frontend(
    redis_url: str = "",
    tables: Mapping[str, Any] = MappingProxyType({}),
    is_new: bool = False,
    **section: Any,
) -> AsyncIterator[Serving]:
    """Serve a frontend with `section` as its configuration and `tables` as the rest; no router yet.

    Without `redis_url` there is no Redis. A Redis that responds is waited for, see ANSWER_S. `is_new`: with all of
    its tasks, as a process that has just started. It diverts nothing before it has found its routers.
    """
    config = configuration.build({"frontend": section, **tables})
    url = redis_url or f"redis://127.0.0.1:{next(free_ports('127.0.0.1', 1))}"
    options = ServiceOptions(config, "frontend-0", "127.0.0.1:0", url, 0, AS_LISTENED)
    frontend = Frontend(options, served_versions.load(config), answer_s=ANSWER_S)
    address = await frontend.server.listen("127.0.0.1:0")
    http_address = frontend.http.listen("127.0.0.1:0")
    if is_new:
        await frontend.prepare()
        works = [work for _, work in frontend.background()]
    else:
        frontend.is_started.set()
        works = [frontend.links.run()]
        if redis_url:
            works += [*(work for _, work in frontend.accounts.background()), frontend.tenants.run()]
    running = [asyncio.create_task(work) for work in works]
    channel = grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)])
    try:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        yield Serving(frontend, address, channel, stub, http_address)
    finally:
        await channel.close(None)
        await frontend.http.stop()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await frontend.server.grpc.stop(0)
        await frontend.close()


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    """The attempts of all routers."""
    pool = Pool()
    stepping = asyncio.create_task(pool.run())
    yield pool
    stepping.cancel()
    await asyncio.gather(stepping, return_exceptions=True)


@pytest.fixture
async def serving(pool: Pool) -> AsyncIterator[Serving]:
    """A frontend with one router."""
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving_router(pool, "router-0"))
        made = await stack.enter_async_context(serving_frontend())
        made.route([("router-0", address)])
        await made.until_up(1)
        yield made
