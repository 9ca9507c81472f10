"""Links of a frontend follow processes: a restarted router is used beside its predecessor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc

from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.server import AttachService
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.attach.v1 import attach_pb2_grpc
from kvmesh.clock import MonotonicClock
from kvmesh.membership.member import Member
from kvmesh.server import SERVER_OPTIONS
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.retry_budget import RetryBudget
from services.frontend.requests.retry_state import Limits
from services.frontend.routers import router_links
from tests.integration.frontend.conftest import serving_frontend
from tests.patience import patience
from tests.unit.pools.leases import lease


class Quiet:
    """A router that sends no response."""

    def open_session(self, peer: pb.Hello, outbox: DownwardOutbox, now_s: float) -> Quiet:
        return self

    def after_event(self) -> None:
        return None

    def on_request(self, message: pb.AttachRequest, now_s: float) -> None:
        return None

    def on_closed(self, now_s: float) -> None:
        return None


async def router(stack: AsyncExitStack, boot_id: str) -> tuple[AttachService, Member]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    hello = pb.Hello(process_id="router-0", boot_id=boot_id, protocol_version=1)
    attach = AttachService(Quiet(), hello, MonotonicClock())
    attach_pb2_grpc.add_AttachServiceServicer_to_server(attach, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    stack.push_async_callback(server.stop, 0)
    member = Member(
        process_id="router-0",
        role="router",
        address=address,
        boot_id=boot_id,
        model_version="m",
        block_tokens=4,
    )
    return attach, member


def up_count(core: FrontendCore) -> int:
    return sum(peer.link.is_up for peer in core.peers)


async def until(condition: Callable[[], bool]) -> None:
    async with patience(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_router_that_started_again_is_reached_while_its_predecessor_drains() -> None:
    """New requests go to the newer process at once; the older one's stream is closed after its last request."""
    core = FrontendCore(Limits(3, 3.0, 4), limit=8, retries=RetryBudget(0.1, 3.0, 0.0), jitter=lambda: 0.5)
    hello = pb.Hello(process_id="f", boot_id="f", protocol_version=1)
    links = router_links(core, hello, lambda member: True, MonotonicClock(), _channel)
    async with AsyncExitStack() as stack:
        old, old_member = await router(stack, "A")
        new, new_member = await router(stack, "B")
        task = asyncio.create_task(links.run())
        links.update([old_member])
        await until(lambda: up_count(core) == 1)
        first = core.peers.choose("default", "any", model_version="m")
        assert first is not None and first.name == "router-0"
        request: Any = object()
        first.slots[1] = request
        links.update([new_member])
        await until(lambda: up_count(core) == 2)
        chosen = core.peers.choose("default", "any", model_version="m")
        assert chosen is not None and chosen is not first and first.is_draining
        del first.slots[1]
        await until(lambda: old.stream_count == 0 and up_count(core) == 1)
        assert core.peers.choose("default", "any", model_version="m") is chosen and new.stream_count == 1
        for boot in range(4):
            links.update([old_member if boot % 2 == 0 else new_member])
            await until(lambda: up_count(core) >= 1)
        await until(lambda: (old.stream_count, new.stream_count, len(links)) == (0, 1, 1))
        task.cancel()
        await asyncio.wait([task])
        assert len(core.peers) == 0


async def test_a_router_that_started_again_at_its_address_is_attached_again() -> None:
    """A new boot at the old address is a new process; the old process is not waited for."""
    core = FrontendCore(Limits(3, 3.0, 4), limit=8, retries=RetryBudget(0.1, 3.0, 0.0), jitter=lambda: 0.5)
    hello = pb.Hello(process_id="f", boot_id="f", protocol_version=1)
    links = router_links(core, hello, lambda member: True, MonotonicClock(), _channel)
    async with AsyncExitStack() as stack:
        attach, member = await router(stack, "B")
        task = asyncio.create_task(links.run())
        links.update([Member(**{**_fields(member), "boot_id": "A"})])
        await until(lambda: any(linked.link.failures > 1 for linked in links))
        assert core.peers.choose("default", "any", model_version="m") is None
        links.update([member])
        await until(lambda: up_count(core) == 1 and len(links) == 1)
        assert attach.stream_count == 1
        task.cancel()
        await asyncio.wait([task])


def _fields(member: Member) -> dict[str, Any]:
    return {name: getattr(member, name) for name in member.__struct_fields__}


def _channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


async def test_replicas_of_other_pools_do_not_make_resumed_tokens_unsure() -> None:
    """A frontend tells its clients that a resumed stream is exact if all engines of its pool can seed."""
    pools: dict[str, Any] = {"pools": {"a": {}, "b": {}}}
    async with serving_frontend(tables=pools) as served:
        own = lease("a-decode-0", model_version="kvmesh-1", capabilities=("seeded_resume",))
        other = lease("b-decode-0", model_version="kvmesh-1", pool="b")
        served.frontend.on_members([own, other])
        assert served.frontend.is_seeded("a") and not served.frontend.is_seeded("b")
        served.frontend.on_members([own, lease("a-decode-1", model_version="kvmesh-1")])
        assert not served.frontend.is_seeded("a") and not served.frontend.is_seeded("us/a")
