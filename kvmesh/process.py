"""Life cycle of a service's process: build, join the mesh, serve, drain, leave.

Router, frontend and replicas build a `MeshProcess`, and `main` runs it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, Literal, TypeVar

from kvmesh.attach.outbox import MESSAGE_BYTES_MAX
from kvmesh.attach.server import PROTOCOL_VERSION, Attachable, AttachService
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.attach.v1 import attach_pb2_grpc
from kvmesh.clock import MonotonicClock
from kvmesh.config import ConfigError
from kvmesh.control.v1 import shadow_pb2, snapshot_pb2
from kvmesh.control_link import ControlLink
from kvmesh.life_state import LifeState
from kvmesh.membership import telemetry as name_telemetry
from kvmesh.membership.address_filter import AddressFilter
from kvmesh.membership.member import POOLS, Member
from kvmesh.membership.membership import Membership
from kvmesh.membership.region_claim import RegionClaim
from kvmesh.membership.registration import Registration
from kvmesh.metrics import Metrics
from kvmesh.metrics_port import exposed
from kvmesh.redis_link import RedisLink
from kvmesh.request_reader import RequestReader, export_request_reader
from kvmesh.server import MeshServer, run
from kvmesh.service_options import POOLED, ServiceOptions
from kvmesh.snapshot.content import Content
from kvmesh.snapshot.identity import Identity
from kvmesh.snapshot.published import Published
from kvmesh.tasks import end
from kvmesh.telemetry import start_logging, tracing_of
from kvmesh.trust.networks import Networks
from kvmesh.trust.peers import EXPIRES, Trust

log = logging.getLogger(__name__)

ATTACH_NAME: Final = "kvmesh.attach.v1.AttachService"
UNREGISTERED: Final = "it registers: its peers do not know it yet"
"""Reason of a process that has not written its lease. Later outages of Redis do not make it unready."""

USAGE_ERROR: Final = 2
"""Exit status of a failed start."""

Role = Literal["frontend", "router", "prefill", "decode"]
Options = TypeVar("Options", bound=ServiceOptions)


def main(
    role: str,
    parse: Callable[[], Options],
    serve: Callable[[Options], Coroutine[Any, Any, None]],
    usage_errors: tuple[type[Exception], ...],
) -> int:
    """Run `serve` with the options that `parse` returns, and return the exit status.

    2: the start failed with one of `usage_errors`, and one sentence on stderr has the reason.
    """

    async def served(options: Options) -> int:
        await serve(options)
        return 0

    try:
        options = parse()
        start_logging(options.config.telemetry.log_level, role, options.process_id)
        return run(served(options))
    except usage_errors as error:
        sys.stderr.write(f"{error}\n")
        return USAGE_ERROR


class MeshProcess:
    """A process of the mesh, built but not started. `serve` opens its sockets, lease and tasks.

    A role sets `server`, and overrides the steps of `serve` that it needs.
    """

    server: MeshServer

    def __init__(self, role: Role, options: ServiceOptions, trust: Trust) -> None:
        config = options.config
        self.role = role
        self.options = options
        self.pool = options.pool_settings
        self.trust = trust
        self.boot_id = secrets.token_hex(8)
        self.hello = pb.Hello(
            process_id=options.process_id,
            boot_id=self.boot_id,
            protocol_version=PROTOCOL_VERSION,
            region=config.region.name,
        )
        self.clock = MonotonicClock()
        self.networks = Networks(config.trust.networks)
        self.redis = RedisLink(options.redis_url)
        self.metrics = Metrics(role)
        self.metrics.gauge("certificate_expires_seconds", EXPIRES, trust.expires_s)
        self.tracing = tracing_of(config.telemetry, role, options.process_id)
        self.registration: Registration | None = None
        """Set while the process serves."""
        self.control = ControlLink(
            *(self, self.identity(), options, self.redis, trust, self.networks, self.clock, self.metrics)
        )

    def serve_attach(self, core: Attachable, service_name: str) -> AttachService:
        """Set `server` to a server with Attach for `core` and, beside it, the service `service_name`."""
        reader = RequestReader(MESSAGE_BYTES_MAX, clock=self.clock)
        export_request_reader(self.metrics, reader)
        attach = AttachService(core, self.hello, self.clock, reader)
        self.server = MeshServer(
            self.role,
            self.options.process_id,
            (ATTACH_NAME, service_name),
            credentials=self.trust.server_credentials(),
            guards=self.trust.guards(),
            request_reader=reader,
            transport=self.options.config.mesh.hops,
        )
        attach_pb2_grpc.add_AttachServiceServicer_to_server(attach, self.server.grpc)
        return attach

    async def serve(self) -> None:
        """Join the mesh and serve until a signal. Then drain and leave (graceful shutdown).

        Raises ListenError, or ConfigError if Redis belongs to another region.
        """
        options, mesh = self.options, self.options.config.mesh.name
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.close)
            claim = RegionClaim(self.redis, mesh, options.config.region.name)
            if fault := await claim.fault_if_reachable():
                raise ConfigError(fault)
            metrics_address = await stack.enter_async_context(
                exposed(self.metrics, self.unready_reason, options.host, options.metrics_port)
            )
            self.metrics.process_gauges()
            address = await self.server.listen(options.listen)
            more = await stack.enter_async_context(self.further_ports())
            member = self.member(options.advertise.address(address))
            self.registration = Registration(self.redis, mesh, member, self.stand_by, claim=claim)
            stack.push_async_callback(self.registration.deregister)
            address_filter = AddressFilter(self.networks)
            name_telemetry.export(self.registration, address_filter, self.metrics)
            membership = Membership(
                self.redis, mesh, self.on_members, own=self.registration, address_filter=address_filter
            )
            await self.control.start(self.registration)
            await self.prepare()
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(work, name=name)
                    for name, work in (
                        *self.background(),
                        *self.control.background(self.server),
                        ("membership", membership.run()),
                        ("registration", self._register(self.registration, metrics_address, more)),
                    )
                ]
                try:
                    await self.server.run(self._drain)
                finally:
                    await self.flush()
                    await end(running)

    async def _register(
        self, registration: Registration, metrics_address: str, more: Mapping[str, str]
    ) -> None:
        await self.become_ready()
        self.server.announce(metrics_address, more)
        await registration.run()

    async def _drain(self) -> None:
        # Marked, not removed: other processes still need the lease until all requests here have ended.
        self.control.leave()
        await self.drain()

    async def set_serving(self) -> None:
        """Become SERVING. Then freeze all objects: they live as long as the process, and garbage collection skips them."""
        await self.server.set_serving(True)
        about = {"pool": self.pool.name} if self.role in POOLED else {}
        if self.role == "frontend":
            about["edge"] = self.options.config.frontend.edge
        log.info(
            "serving",
            extra={
                "address": self.server.address,
                "model_version": self.pool.version.name,
                "hops": self.options.config.mesh.hops,
                **about,
            },
        )
        gc.collect()
        gc.freeze()

    def unready_reason(self) -> str:
        """Return why the process is out of service for users. Empty: an orchestrator may count it as available.

        Health may be SERVING nevertheless: peers need the health of a replica that is held, or of a cordoned router.
        """
        is_known = self.registration is not None and self.registration.has_held
        reason = self.server.unready_reason or self.control.cordon_reason or self.held_reason
        return reason or ("" if is_known else UNREGISTERED)

    # The steps of a role.

    def member(self, address: str) -> Member:
        """Return the member to register."""
        return Member(
            process_id=self.options.process_id,
            role=self.role,
            address=address,
            boot_id=self.boot_id,
            model_version=self.pool.version.name,
            block_tokens=self.options.config.engine.block_tokens,
            pool=self.pool.name if self.role in POOLED else "",
            region=self.options.config.region.name,
            capabilities=(POOLS,),
        )

    def on_members(self, members: list[Member]) -> None:
        """Take a new view of the mesh. Ignored by default."""

    async def stand_by(self, reason: str) -> None:
        """Take the reason why another process holds the name. Empty: this process holds it."""
        await self.server.stand_by(reason)

    async def prepare(self) -> None:
        """Load the data that the background tasks need. Does nothing by default."""

    @asynccontextmanager
    async def further_ports(self) -> AsyncIterator[Mapping[str, str]]:
        """Serve on ports beside those of gRPC and of the metrics, inside the block. Yield their addresses by kind.

        None by default. Raises OSError if a port is in use.
        """
        yield {}

    def background(self) -> Iterable[tuple[str, Coroutine[Any, Any, None]]]:
        """Return the tasks that run while the process serves, with their names."""
        return ()

    async def become_ready(self) -> None:
        """Return once the process may register."""
        await self.set_serving()

    async def drain(self) -> None:
        """Refuse new requests, and return when all running requests have ended. Cancelled at the end of the drain time."""

    # The steps of a role under the control plane (see `Controlled`).

    @property
    def takes_cordon_by_lease(self) -> bool:
        """True: peers place nothing new on a process that drains, and go on with the rest. Frontends have no such peers."""
        return self.role in POOLED

    def identity(self) -> Identity:
        """Return the introduction of the process to the control plane. Called by the constructor."""
        pool = self.pool.name if self.role in POOLED else ""
        return Identity(self.options.process_id, self.boot_id, self.role, pool, (POOLS,))

    def refusal(self, content: Content) -> str:
        """Return why this process cannot serve `content`, or an empty text. It accepts every content by default."""
        return ""

    def on_snapshot(self, published: Published) -> None:
        """Take the snapshot in force, after each change. Not called before the first one: see `control.content`."""

    def set_cordoned(self, is_cordoned: bool) -> None:
        """Report to callers whether they may place new requests here. Does nothing by default."""

    def begin_drain(self) -> None:
        """Refuse new requests and finish the others, until `end_drain`. Does nothing by default."""

    def end_drain(self) -> None:
        """Take new requests again. Does nothing by default."""

    def report(self) -> snapshot_pb2.ReceiverReport:
        """Return the state of the process for the control plane."""
        return snapshot_pb2.ReceiverReport()

    def observations(self) -> snapshot_pb2.ObservationBatch | None:
        """Return observations that were not sent yet. None by default."""
        return None

    def shadows(self) -> Sequence[shadow_pb2.ShadowReport]:
        """Return the counts of shadow traffic that changed since the last call. Empty by default."""
        return ()

    def on_confirmed(self, sequence: int) -> None:
        """Take the sequence number up to which the control plane has stored observations. Ignored by default."""

    def on_leader(self) -> None:
        """Send unconfirmed observations again: the stream to the leader is new. Ignored by default."""

    @property
    def life_state(self) -> LifeState:
        """State of the process's life. SERVING by default: only replicas are held."""
        return LifeState.SERVING

    @property
    def held_reason(self) -> str:
        """Why the process's life keeps it out of service. Empty by default: only replicas are held."""
        return ""

    def on_life(self, drives_lives: bool, order: snapshot_pb2.LifeOrder | None) -> None:
        """Take a message of a leader about the life of a replica. Ignored by default."""

    def on_regions(self, traffic: snapshot_pb2.RegionTraffic) -> None:
        """Take the latest spill shares and grants of a leader. Ignored by default."""

    async def flush(self) -> None:
        """Write data that must not be lost, while the background tasks still run. Does nothing by default."""

    async def close(self) -> None:
        """Close the resources that the constructor opened."""
        self.tracing.close()
        await self.redis.close()
