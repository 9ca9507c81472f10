"""A replica's process: engine, core, Attach, registration, KV events; serve, then drain. A shell.

What prefill and decode have in common in their main. Each brings a `Build`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final

import grpc

from kvmesh import server as mesh_server
from kvmesh.attach.outbox import MESSAGE_BYTES_MAX
from kvmesh.attach.server import PROTOCOL_VERSION, AttachService
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.attach.v1 import attach_pb2_grpc
from kvmesh.clock import Clock, MonotonicClock
from kvmesh.config import ConfigError
from kvmesh.membership import telemetry as name_telemetry
from kvmesh.membership.address_filter import AddressFilter
from kvmesh.membership.member import Member
from kvmesh.membership.membership import Membership
from kvmesh.membership.registration import Registration
from kvmesh.metrics import Metrics, exposed
from kvmesh.prefix_index import telemetry as index_telemetry
from kvmesh.prefix_index.publisher import Publisher
from kvmesh.redis_link import RedisLink
from kvmesh.replica import options as command_line
from kvmesh.replica.options import Options, ReplicaRole
from kvmesh.replica.shell import ReplicaCore, ReplicaShell
from kvmesh.request_reader import RequestReader, export_request_reader
from kvmesh.tasks import end
from kvmesh.telemetry import Tracing, start_logging, tracing_of
from kvmesh.triton.capabilities import ModelFacts, ModelRefused
from kvmesh.triton.client import TritonClient
from kvmesh.triton.engine import TritonEngine
from kvmesh.triton.errors import CallError
from kvmesh.trust.networks import Networks
from kvmesh.trust.peers import EXPIRES, Trust

ENGINE_WAIT_S: Final = 10.0
"""An engine that is not ready by then is missing. `kvmesh up` starts replicas when their engines are ready."""

ATTACH_NAME: Final = "kvmesh.attach.v1.AttachService"
USAGE_ERROR: Final = 2


@dataclass(frozen=True, slots=True)
class Parts:
    """What a role's status and telemetry are made of."""

    attach: AttachService
    engine: TritonEngine
    clock: Clock


@dataclass(frozen=True, slots=True)
class RoleService:
    """What a role brings: its core, its own service, and who hears of the membership."""

    core: ReplicaCore
    service_name: str
    add_service: Callable[[grpc.aio.Server, Parts], None]
    on_members: Callable[[list[Member]], None]


Build = Callable[[Options, ModelFacts, Metrics, Tracing], RoleService]


def main(role: ReplicaRole, build: Build, arguments: Sequence[str] | None = None) -> int:
    """Run a replica; return its exit status. 2: it could not start, and one sentence on stderr says why."""
    try:
        options = command_line.parse(role, arguments, os.environ)
    except ConfigError as error:
        return _fail(str(error))
    start_logging(options.config.telemetry.log_level, role, options.process_id)
    return mesh_server.run(_run(options, build))


async def _run(options: Options, build: Build) -> int:
    try:
        await _serve(options, build)
    except (ConfigError, ModelRefused, CallError, mesh_server.ListenError) as error:
        return _fail(str(error))
    return 0


async def _serve(options: Options, build: Build) -> None:
    clock = MonotonicClock()
    config = options.config
    trust = Trust(config, options.role)
    async with AsyncExitStack() as stack:
        client = TritonClient(options.engine)
        stack.push_async_callback(client.close)
        await client.wait_ready(ENGINE_WAIT_S)
        facts = await client.facts(
            role=options.role, model_version=config.engine.salt, block_tokens=config.engine.block_tokens
        )
        tracing = tracing_of(config.telemetry, options.role, options.process_id)
        stack.callback(tracing.close)
        metrics = Metrics(options.role)
        metrics.process_gauges()
        metrics.gauge("certificate_expires_seconds", EXPIRES, trust.expires_s)
        role = build(options, facts, metrics, tracing)
        redis = RedisLink(options.redis_url)
        stack.push_async_callback(redis.close)
        metrics_address = await stack.enter_async_context(
            exposed(metrics, options.host, options.metrics_port)
        )
        replica = _Replica(options, role, facts, client, redis, clock, trust, metrics)
        stack.push_async_callback(replica.close)
        await replica.serve(metrics_address)


class _Replica:
    """The running parts of a process, in the order they depend on each other."""

    def __init__(
        self,
        options: Options,
        role: RoleService,
        facts: ModelFacts,
        client: TritonClient,
        redis: RedisLink,
        clock: Clock,
        trust: Trust,
        metrics: Metrics,
    ) -> None:
        config = options.config
        boot_id = secrets.token_hex(8)
        self._role = role
        self._options = options
        self._facts = facts
        self._redis = redis
        self._boot_id = boot_id
        self._shell = ReplicaShell(role.core, clock)
        self._publisher = Publisher(
            redis,
            config.mesh.name,
            options.process_id,
            facts.tokens_per_block,
            facts.model_version,
            snapshot_interval_s=config.router.snapshot_interval_s,
            clock=clock,
        )
        self._engine = TritonEngine(
            client,
            facts,
            role.core.sink,
            clock,
            self._shell.after_event,
            self._publisher.on_engine_message,
        )
        role.core.connect(self._engine)
        hello = pb.Hello(process_id=options.process_id, boot_id=boot_id, protocol_version=PROTOCOL_VERSION)
        request_reader = RequestReader(MESSAGE_BYTES_MAX, clock=clock)
        export_request_reader(metrics, request_reader)
        attach = AttachService(self._shell, hello, clock, request_reader)
        self._server = mesh_server.MeshServer(
            options.role,
            options.process_id,
            (ATTACH_NAME, role.service_name),
            credentials=trust.server_credentials(),
            guards=trust.guards(),
            request_reader=request_reader,
        )
        attach_pb2_grpc.add_AttachServiceServicer_to_server(attach, self._server.grpc)
        role.add_service(self._server.grpc, Parts(attach, self._engine, clock))
        self._metrics = metrics
        index_telemetry.export(self._publisher, metrics)
        self._registration: Registration | None = None
        self._is_announced = asyncio.Event()

    async def serve(self, metrics_address: str) -> None:
        """Serve until a signal, then drain."""
        mesh = self._options.config.mesh.name
        address = await self._server.listen(self._options.listen)
        member = self._member(self._options.advertise.address(address))
        registration = Registration(self._redis, mesh, member, self._on_name_state)
        self._registration = registration
        address_filter = AddressFilter(Networks(self._options.config.trust.networks))
        name_telemetry.export(registration, address_filter, self._metrics)
        membership = Membership(
            self._redis, mesh, self._role.on_members, own=registration, address_filter=address_filter
        )
        async with asyncio.TaskGroup() as tasks:
            background = [
                _start(tasks, self._engine.run(), "engine"),
                _start(tasks, self._shell.report_engine_state(self._report), "engine-state"),
                _start(tasks, self._publisher.run(), "kv-publisher"),
                _start(tasks, membership.run(), "membership"),
                _start(tasks, self._register(registration, metrics_address), "registration"),
            ]
            try:
                await self._server.run(self._drain)
            finally:
                await end(background)

    async def close(self) -> None:
        """Leave the mesh, then end what is left."""
        if self._registration is not None:
            await self._registration.deregister()
        await self._publisher.close()
        await self._engine.close()
        self._shell.close()

    def _member(self, address: str) -> Member:
        return Member(
            process_id=self._options.process_id,
            role=self._options.role,
            address=address,
            boot_id=self._boot_id,
            model_version=self._facts.model_version,
            block_tokens=self._facts.tokens_per_block,
            kv_address=self._facts.kv_address,
            capabilities=tuple(self._facts.capabilities.names()),
        )

    async def _register(self, registration: Registration, metrics_address: str) -> None:
        """Join the mesh once the engine answered."""
        await self._is_announced.wait()
        self._server.announce(metrics_address)
        await registration.run()

    async def _on_name_state(self, reason: str) -> None:
        """Another process has the name for `reason`; empty: this one has it."""
        if reason:
            self._publisher.mute()
        else:
            self._publisher.unmute()
        await self._server.stand_by(reason)

    async def _report(self, is_ready: bool, engine_boot_id: str) -> None:
        await self._server.set_serving(is_ready)
        if self._registration is not None:
            self._registration.update(engine_boot_id=engine_boot_id)
        if is_ready:
            self._is_announced.set()

    async def _drain(self) -> None:
        # Marked, not removed: decode still pulls the handoffs that are held here, and asks whether we are registered.
        if self._registration is not None:
            self._registration.update(draining=True)
        await self._shell.drain()


def _start(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    return tasks.create_task(work, name=name)


def _fail(sentence: str) -> int:
    sys.stderr.write(f"{sentence}\n")
    return USAGE_ERROR
