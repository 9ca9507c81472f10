"""Process of a replica: engine, core, Attach, KV events.

The common part of the programs of prefill and decode. Each role provides a `Build`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
import msgspec

from kvmesh import process
from kvmesh.attach.server import AttachService
from kvmesh.clock import Clock
from kvmesh.config import ConfigError
from kvmesh.control.v1 import snapshot_pb2
from kvmesh.membership.member import Member
from kvmesh.metrics import Metrics
from kvmesh.prefix_index import telemetry as index_telemetry
from kvmesh.prefix_index.publisher import Publisher
from kvmesh.replica import options as command_line
from kvmesh.replica.options import ReplicaOptions, ReplicaRole
from kvmesh.replica.shell import ReplicaCore, ReplicaShell
from kvmesh.server import ListenError
from kvmesh.telemetry import Tracing
from kvmesh.tokenizer_digest import tokenizer_digest
from kvmesh.triton.capabilities import ModelFacts, ModelRefused
from kvmesh.triton.client import TritonClient
from kvmesh.triton.engine import TritonEngine
from kvmesh.triton.errors import CallError
from kvmesh.trust.peers import Trust

ENGINE_WAIT_S: Final = 10.0
"""Longest wait for the engine to be ready at the start. `kvmesh up` starts replicas when their engines are ready."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of the process that a role needs for its status and telemetry."""

    attach: AttachService
    engine: TritonEngine
    clock: Clock


@dataclass(frozen=True, slots=True)
class RoleService:
    """Parts that a role provides: its core, its own service, and the callback for membership changes."""

    core: ReplicaCore
    service_name: str
    add_service: Callable[[grpc.aio.Server, Parts], None]
    on_members: Callable[[list[Member]], None]


Build = Callable[[ReplicaOptions, ModelFacts, Metrics, Tracing], RoleService]


def main(role: ReplicaRole, build: Build, arguments: Sequence[str] | None = None) -> int:
    """Run a replica and return its exit status. 2: the start failed, and one sentence on stderr has the reason."""
    return process.main(
        role,
        lambda: command_line.parse(role, arguments, os.environ),
        lambda options: _serve(options, build),
        (ConfigError, ModelRefused, CallError, ListenError),
    )


async def _serve(options: ReplicaOptions, build: Build) -> None:
    version, trust = options.pool_settings.version, Trust(options.config, options.role)
    client = TritonClient(options.engine)
    try:
        await client.wait_ready(ENGINE_WAIT_S)
        facts = await client.facts(
            role=options.role, model_version=version.name, block_tokens=version.engine.block_tokens
        )
        await _Replica(options, trust, build, facts, client).serve()
    finally:
        await client.close()


class _Replica(process.MeshProcess):
    """The parts of a replica, in the order of their dependencies."""

    def __init__(
        self, options: ReplicaOptions, trust: Trust, build: Build, facts: ModelFacts, client: TritonClient
    ) -> None:
        super().__init__(options.role, options, trust)
        config = options.config
        self._role = build(options, facts, self.metrics, self.tracing)
        self._facts = facts
        self._shell = ReplicaShell(self._role.core, self.clock)
        self._publisher = Publisher(
            self.redis,
            config.mesh.name,
            options.process_id,
            facts.tokens_per_block,
            facts.model_version,
            snapshot_interval_s=config.router.snapshot_interval_s,
            clock=self.clock,
        )
        self._engine = TritonEngine(
            client,
            facts,
            self._role.core.sink,
            self.clock,
            self._shell.after_event,
            self._publisher.on_engine_message,
        )
        self._role.core.connect(self._engine)
        attach = self.serve_attach(self._shell, self._role.service_name)
        self._role.add_service(self.server.grpc, Parts(attach, self._engine, self.clock))
        index_telemetry.export(self._publisher, self.metrics)
        self._was_ready = asyncio.Event()

    def member(self, address: str) -> Member:
        """Return the member to register."""
        digests = {
            "tokenizer": tokenizer_digest(self.pool.version.model_path),
            "engine": self._facts.digest,
        }
        member = super().member(address)
        return msgspec.structs.replace(
            member,
            kv_address=self._facts.kv_address,
            digests={kind: digest for kind, digest in digests.items() if digest},
            capabilities=(*member.capabilities, *self._facts.capabilities.names()),
        )

    def on_members(self, members: list[Member]) -> None:
        """Pass the members to the role."""
        self._role.on_members(members)

    async def stand_by(self, reason: str) -> None:
        """Publish no KV events while another process holds the name."""
        if reason:
            self._publisher.mute()
        else:
            self._publisher.unmute()
        await super().stand_by(reason)

    def background(self) -> Iterable[tuple[str, Coroutine[Any, Any, None]]]:
        """Return the tasks of the engine and of the KV events."""
        yield "engine", self._engine.run()
        yield "engine-state", self._shell.report_engine_state(self._report)
        yield "kv-publisher", self._publisher.run()

    async def become_ready(self) -> None:
        """Return once the engine has answered."""
        await self._was_ready.wait()

    async def drain(self) -> None:
        """Refuse new requests, and return when no slot is left. Decode still pulls the handoffs that are held here."""
        await self._shell.drain()

    def set_cordoned(self, is_cordoned: bool) -> None:
        """Report to routers whether they may place new requests here."""
        self._shell.set_cordoned(is_cordoned)

    def begin_drain(self) -> None:
        """Refuse new requests. Running ones go on, and decode still pulls the handoffs that are held here."""
        self._shell.begin_drain()

    def end_drain(self) -> None:
        """Take new requests again."""
        self._shell.end_drain()

    def report(self) -> snapshot_pb2.ReceiverReport:
        """Return the number of requests and the memory of the engine."""
        core = self._role.core
        load = core.sink.load
        return snapshot_pb2.ReceiverReport(
            live_request_count=core.live_request_count(),
            engine_memory_bytes=load.resident_bytes if load is not None else 0,
        )

    async def close(self) -> None:
        """Close the parts of the replica."""
        await self._publisher.close()
        await self._engine.close()
        self._shell.close()
        await super().close()

    async def _report(self, is_ready: bool, engine_boot_id: str) -> None:
        await self.server.set_serving(is_ready)
        if self.registration is not None:
            self.registration.update(engine_boot_id=engine_boot_id)
        if is_ready:
            self._was_ready.set()
