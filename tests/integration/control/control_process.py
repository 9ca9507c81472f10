"""Control processes inside a test: a real server, a real Redis, real streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec

from controlplane.main import ControlProcess
from kvmesh.advertise import AS_LISTENED
from kvmesh.config import MeshConfig, build
from kvmesh.control.v1 import control_pb2_grpc as control_stubs
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.control.v1 import snapshot_pb2_grpc as snapshot_stubs
from kvmesh.membership.member import Member
from kvmesh.redis_link import RedisLink
from kvmesh.service_options import ServiceOptions
from tests.patience import patience

WITHIN_S = 15.0

POOLS = {
    "pools": {"stable": {"version": "v1"}, "next": {"version": "v2"}},
    "versions": {"v1": {}, "v2": {}},
    "engine": {"arithmetic": "hashed"},
}
"""Two pools of two versions."""


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str) -> None:
    """Wait for a condition. Raises AssertionError."""
    try:
        async with patience(WITHIN_S):
            while True:
                found = condition()
                if found if isinstance(found, bool) else await found:
                    return
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {WITHIN_S:g} s: {what}") from None


@asynccontextmanager
async def control(
    url: str,
    name: str = "control-0",
    config: MeshConfig | None = None,
    *,
    listen: str = "127.0.0.1:0",
    state: Path | None = None,
) -> AsyncIterator[ControlProcess]:
    """A serving control process."""
    one = ControlProcess(
        ServiceOptions(config or build(POOLS), name, listen, url, 0, AS_LISTENED, state_dir=state)
    )
    task = asyncio.create_task(one.serve())
    try:
        await until(lambda: one.server.address != "" or task.done(), f"{name} listens")
        yield one
    finally:
        one.server.stop()
        await task


@asynccontextmanager
async def leading(url: str, **options: Any) -> AsyncIterator[ControlProcess]:
    """A control process that leads and has published."""
    async with control(url, **options) as one:
        await until(lambda: one.core.publisher.published is not None, "a snapshot is published")
        yield one


def hello(name: str = "frontend-0", role: str = "frontend", **fields: Any) -> pb.WatchRequest:
    """Return the first message of a receiver."""
    return pb.WatchRequest(
        hello=pb.ReceiverHello(process_id=name, boot_id="b0", role=role, capabilities=["pools"], **fields)
    )


Watching = grpc.aio.StreamStreamCall[pb.WatchRequest, pb.WatchResponse]


@asynccontextmanager
async def watching(
    address: str, first: pb.WatchRequest | None, channel: grpc.aio.Channel | None = None
) -> AsyncIterator[Watching]:
    """A Watch stream after its first message; None: nothing was sent."""
    async with AsyncExitStack() as stack:
        if channel is None:
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        call: Watching = snapshot_stubs.SnapshotServiceStub(channel).Watch()  # type: ignore[call-arg]  # the stubs want an iterator
        stack.callback(call.cancel)
        if first is not None:
            await call.write(first)
        yield call


async def snapshot_of(call: Watching) -> pb.Snapshot:
    """Return the next snapshot of a stream."""
    async with patience(WITHIN_S):
        while True:
            message = await call.read()
            assert isinstance(message, pb.WatchResponse), "the stream ended"
            if message.HasField("snapshot"):
                return message.snapshot


@asynccontextmanager
async def operator(address: str) -> AsyncIterator[Any]:
    """A stub of ControlPlaneService without TLS."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield control_stubs.ControlPlaneServiceStub(channel)


class Leases:
    """Leases of processes that a test writes itself."""

    def __init__(self, redis: RedisLink) -> None:
        self._redis = redis

    async def write(
        self, name: str, role: str, pool: str, *, capabilities: tuple[str, ...] = ("pools",)
    ) -> None:
        """Write the lease of one process, for a minute."""
        member = Member(
            process_id=name,
            role=role,  # type: ignore[arg-type]  # one of the roles
            address="127.0.0.1:1",
            boot_id=f"boot-{name}",
            model_version="v1" if pool != "next" else "v2",
            block_tokens=32,
            pool=pool,
            capabilities=capabilities,
        )
        await self._redis.execute("SADD", "kvmesh:procs", name)
        await self._redis.execute("SET", f"kvmesh:proc:{name}", msgspec.json.encode(member), "EX", 60)
