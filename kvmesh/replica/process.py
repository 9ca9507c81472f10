"""Process of a replica: engine, core, Attach, KV events.

The common part of the programs of prefill and decode. Each role provides a `Build`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc
import msgspec

from kvmesh import process
from kvmesh.attach.server import AttachService
from kvmesh.clock import Clock
from kvmesh.config import ConfigError
from kvmesh.control.v1 import snapshot_pb2
from kvmesh.life_state import LifeState
from kvmesh.membership.member import LIFE, Member
from kvmesh.metrics import Metrics
from kvmesh.prefix_index import telemetry as index_telemetry
from kvmesh.prefix_index.publisher import Publisher
from kvmesh.replica import options as command_line
from kvmesh.replica.configured_facts import configured_facts
from kvmesh.replica.engine_facts import EngineFacts
from kvmesh.replica.engine_rival import EngineRival
from kvmesh.replica.facts_reader import FactsReader
from kvmesh.replica.life_shell import LifeShell
from kvmesh.replica.options import ReplicaOptions, ReplicaRole
from kvmesh.replica.quarantine_file import QuarantineFile
from kvmesh.replica.shell import ReplicaCore, ReplicaShell
from kvmesh.replica.vocabulary import vocabulary_fault
from kvmesh.server import BATCHED, ListenError
from kvmesh.snapshot.identity import Identity
from kvmesh.telemetry import Tracing
from kvmesh.tokenizer_digest import tokenizer_digest, tokenizer_of
from kvmesh.triton.capabilities import ModelFacts, ModelRefused
from kvmesh.triton.client import TritonClient
from kvmesh.triton.engine import TritonEngine
from kvmesh.triton.errors import CallError
from kvmesh.trust.peers import Trust

log = logging.getLogger(__name__)

ENGINE_WAIT_S: Final = 10.0
"""Longest wait for the engine to be ready at the start. `kvmesh up` starts replicas when their engines are ready."""


ENGINE_LOST: Final = "its engine does not answer"


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
    client = TritonClient(options.engine, has_linked_streams=options.config.mesh.hops == BATCHED)
    try:
        await client.wait_ready(ENGINE_WAIT_S)
        reader = FactsReader(
            client,
            role=options.role,
            model_version=version.name,
            block_tokens=version.engine.block_tokens,
            configured=configured_facts(options.config, options.role),
            metrics_address=options.engine_metrics,
        )
        facts = EngineFacts(await reader.read(), reader.read)
        if fault := vocabulary_fault(tokenizer_of(version.model_path), facts.facts.vocab_size):
            raise ModelRefused(fault)
        await _Replica(options, trust, build, facts, client).serve()
    except ExceptionGroup as group:
        refused = group.subgroup(ModelRefused)
        if refused is None:
            raise
        raise ModelRefused(str(refused.exceptions[0])) from group
    finally:
        await client.close()


class _Replica(process.MeshProcess):
    """The parts of a replica, in the order of their dependencies."""

    def __init__(
        self,
        options: ReplicaOptions,
        trust: Trust,
        build: Build,
        engine_facts: EngineFacts,
        client: TritonClient,
    ) -> None:
        super().__init__(options.role, options, trust)
        config = options.config
        facts = engine_facts.facts
        self._role = build(options, facts, self.metrics, self.tracing)
        self._engine_facts = engine_facts
        self._facts = facts
        self._life = LifeShell(self.clock, self._on_life_changed, QuarantineFile(options.state_dir))
        self._life.export(self.metrics)
        self._shell = ReplicaShell(self._role.core, self.clock, self._on_engine)
        self._shell.set_life(self._life.life.view())
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
            self._on_kv_events,
            options.engine_metrics,
            step_frames=config.engine.step_frames,
        )
        self._role.core.connect(self._engine)
        attach = self.serve_attach(self._shell, self._role.service_name)
        self._role.add_service(self.server.grpc, Parts(attach, self._engine, self.clock))
        index_telemetry.export(self._publisher, self.metrics)
        self._was_ready = asyncio.Event()
        self._rival = EngineRival(options.process_id)

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
            capabilities=(*member.capabilities, LIFE, *self._facts.capabilities.names()),
        )

    def identity(self) -> Identity:
        """Return the introduction of the replica to the control plane."""
        identity = super().identity()
        return replace(identity, capabilities=(*identity.capabilities, LIFE))

    def on_members(self, members: list[Member]) -> None:
        """Pass the members to the role."""
        self._rival.take_members(members)
        self._role.on_members(members)

    async def stand_by(self, reason: str) -> None:
        """Publish no KV events while another process holds the name."""
        if reason:
            self._publisher.mute()
        else:
            self._publisher.unmute()
        await super().stand_by(reason)

    async def prepare(self) -> None:
        """Begin the life: the replica is held if a control process has a lease. Without Redis none is known."""
        self._life.start(is_control_known=self.control.receiver.knows_control_process)

    def background(self) -> Iterable[tuple[str, Coroutine[Any, Any, None]]]:
        """Return the tasks of the engine and of the KV events."""
        yield "engine", self._engine.run()
        yield "engine-facts", self._engine_facts.run()
        yield "engine-state", self._shell.report_engine_state(self._report)
        yield "engine-rival", self._rival.watch()
        yield "kv-publisher", self._publisher.run()

    async def become_ready(self) -> None:
        """Return once the engine has answered, no replica shares it, and a known control process had time to answer."""
        await self._was_ready.wait()
        await self._rival.look()
        await self._life.contact()
        config = self.options.config
        log.info(
            "serving",
            extra={
                "address": self.server.address,
                "model_version": self.pool.version.name,
                "pool": self.pool.name,
                "hops": config.mesh.hops,
                "step_frames": config.engine.step_frames and self._facts.step_frames,
            },
        )

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

    @property
    def life_state(self) -> LifeState:
        """State of the replica's life."""
        return self._life.life.state

    @property
    def held_reason(self) -> str:
        """Why the replica is out of service: the control plane holds it, or it is quarantined."""
        return self._life.life.view().held_reason

    def on_life(self, drives_lives: bool, order: snapshot_pb2.LifeOrder | None) -> None:
        """Take a message of a leader about the life of the replica."""
        self._life.on_leader(drives_lives, order)

    def report(self) -> snapshot_pb2.ReceiverReport:
        """Return the requests and their longest wait, the memory of the engine, its cached blocks, and the life."""
        core = self._role.core
        load, now_s = core.sink.load, self.clock.now_s()
        return snapshot_pb2.ReceiverReport(
            live_request_count=core.live_request_count(),
            engine_memory_bytes=load.resident_bytes if load is not None else 0,
            life=self._life.life.report(now_s, is_engine_lost=not core.sink.is_ready),
            cached_block_count=core.cached_block_count(),
            longest_wait_us=core.longest_wait_us(now_s),
        )

    async def close(self) -> None:
        """Close the parts of the replica."""
        await self._publisher.close()
        await self._engine.close()
        self._shell.close()
        self._life.close()
        await super().close()

    def _on_engine(self, boot_id: str) -> None:
        self._engine_facts.on_engine(boot_id)
        self._life.on_engine(boot_id, is_control_known=self.control.receiver.knows_control_process)

    def _on_life_changed(self) -> None:
        self._shell.set_life(self._life.life.view())
        self.control.on_life_changed()

    def _on_kv_events(self, message: Mapping[str, Any]) -> None:
        """Publish the engine's events, and tell the core how many blocks they leave in the cache."""
        self._publisher.on_engine_message(message)
        if self._publisher.epoch:
            self._role.core.set_cached_blocks(self._publisher.epoch, self._publisher.block_count)
            self._shell.after_event()

    async def _report(self, is_ready: bool, engine_boot_id: str) -> None:
        await self.server.set_serving(is_ready, "" if is_ready else ENGINE_LOST)
        self._rival.take_engine(engine_boot_id)
        if self.registration is not None:
            self.registration.update(engine_boot_id=engine_boot_id)
        if is_ready:
            self._was_ready.set()
