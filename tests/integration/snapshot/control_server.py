"""A minimal control process for tests: a real gRPC server for `SnapshotService.Watch`, and its lease in Redis.

It decides nothing. A test publishes through it and reads what receivers said.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import msgspec

from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.control.v1 import snapshot_pb2_grpc
from kvmesh.redis_link import RedisLink, RedisUnavailable, key
from kvmesh.server import MeshServer
from kvmesh.snapshot.control_processes import ControlProcess
from kvmesh.snapshot.published import Published
from tests.patience import patience

RENEW_S = 0.2
HEARTBEAT_S = 1.0
PACE_S = 0.02


class ControlServer(snapshot_pb2_grpc.SnapshotServiceServicer):
    """One control process. Set the fields before receivers arrive, or `push` afterwards."""

    def __init__(self, name: str, redis: RedisLink, mesh: str) -> None:
        self.name = name
        self.address = ""
        self.is_leader = True
        self.leader_address = ""
        self.drives_lives = False
        """True: the leader hint says that this process drives the lives of replicas."""
        self.is_silent = False
        """True: accepts streams and sends nothing."""
        self.first: Callable[[], pb.WatchResponse] | None = None
        """Makes another first message than the leader hint."""
        self.published: Published | None = None
        self.hellos: list[pb.ReceiverHello] = []
        self.applied: dict[str, pb.SnapshotName] = {}
        self.rejected: list[pb.Rejection] = []
        self.reports: dict[str, pb.ReceiverReport] = {}
        self.observations: list[pb.ObservationBatch] = []
        self.call_count = 0
        """Streams that were opened."""
        self._streams: list[asyncio.Queue[pb.WatchResponse | None]] = []
        self._redis = redis
        self._mesh = mesh
        self._grpc = grpc.aio.server()
        self._renewing: asyncio.Task[None] | None = None

    @property
    def stream_count(self) -> int:
        """Receivers that are attached now."""
        return len(self._streams)

    def publish(self, published: Published) -> None:
        """Send a snapshot to every receiver, and to each later one."""
        self.published = published
        self.push(pb.WatchResponse(snapshot=pb.Snapshot.FromString(published.data)))

    def push(self, message: pb.WatchResponse) -> None:
        """Send `message` to every receiver."""
        for stream in self._streams:
            stream.put_nowait(message)

    def cut(self) -> None:
        """End every stream."""
        for stream in self._streams:
            stream.put_nowait(None)

    def versions(self) -> dict[str, str]:
        """Return "number.leader/version" of the last acknowledgement by receiver."""
        return {
            name: f"{one.term.number}.{one.term.leader}/{one.version}" for name, one in self.applied.items()
        }

    async def start(self, address: str = "127.0.0.1:0", on: MeshServer | None = None) -> None:
        """Listen, and write the lease. `on`: a server with certificates; without it there is no TLS."""
        self._grpc = grpc.aio.server() if on is None else on.grpc
        snapshot_pb2_grpc.add_SnapshotServiceServicer_to_server(self, self._grpc)
        if on is None:
            self.address = f"127.0.0.1:{self._grpc.add_insecure_port(address)}"
            await self._grpc.start()
        else:
            self.address = await on.listen(address)
        await self._renew()
        self._renewing = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """End at once, as a crash does: the lease stays until it is old."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
            self._renewing = None
        await self._grpc.stop(0)

    async def Watch(
        self, requests: AsyncIterator[pb.WatchRequest], context: Any
    ) -> AsyncIterator[pb.WatchResponse]:
        """Serve one receiver."""
        queue: asyncio.Queue[pb.WatchResponse | None] = asyncio.Queue()
        self.call_count += 1
        reading = asyncio.create_task(self._read(requests))
        hint = pb.LeaderHint(
            process_id=self.name,
            is_leader=self.is_leader,
            leader_address=self.leader_address,
            drives_lives=self.drives_lives,
        )
        try:
            if self.is_silent:
                await asyncio.Event().wait()
            yield self.first() if self.first is not None else pb.WatchResponse(leader=hint)
            if not self.is_leader:
                return
            self._streams.append(queue)
            if self.published is not None:
                yield pb.WatchResponse(snapshot=pb.Snapshot.FromString(self.published.data))
            while True:
                try:
                    message = await asyncio.wait_for(queue.get(), HEARTBEAT_S)
                except TimeoutError:
                    message = pb.WatchResponse()
                if message is None:
                    return
                yield message
        finally:
            reading.cancel()
            with suppress(ValueError):
                self._streams.remove(queue)

    async def _read(self, requests: AsyncIterator[pb.WatchRequest]) -> None:
        name = ""
        async for message in requests:
            if message.HasField("hello"):
                name = message.hello.process_id
                self.hellos.append(message.hello)
            if message.HasField("applied"):
                self.applied[name] = message.applied
            if message.HasField("rejected"):
                self.rejected.append(message.rejected)
            if message.HasField("report"):
                self.reports[name] = message.report
            if message.HasField("observations"):
                self.observations.append(message.observations)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            with suppress(RedisUnavailable):
                await self._renew()

    async def _renew(self) -> None:
        seconds, micros = await self._redis.execute("TIME")
        lease = ControlProcess(
            process_id=self.name,
            boot_id="boot",
            address=self.address,
            at_ms=int(seconds) * 1000 + int(micros) // 1000,
        )
        procs = key(self._mesh, "control", "procs")
        await self._redis.execute("HSET", procs, self.name, msgspec.json.encode(lease))


@asynccontextmanager
async def running_control(redis_url: str, mesh: str, name: str = "control-0") -> AsyncIterator[ControlServer]:
    """Run one control process inside the block."""
    redis = RedisLink(redis_url)
    server = ControlServer(name, redis, mesh)
    try:
        await server.start()
        yield server
    finally:
        await server.stop()
        await redis.close()


async def until(condition: Callable[[], object], what: str, timeout_s: float = 15.0) -> None:
    """Wait for `condition`. Fails with `what`."""
    try:
        async with patience(timeout_s):
            while not condition():
                await asyncio.sleep(PACE_S)
    except TimeoutError:
        raise AssertionError(f"{what}, within {timeout_s:g} s") from None
