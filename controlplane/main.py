"""The control process: config -> build -> serve -> give the leadership back."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final

from controlplane import options as control_options
from controlplane import telemetry
from controlplane.actions import RunGolden
from controlplane.core import ControlCore
from controlplane.golden_runner import GoldenRunner, golden_sets
from controlplane.loop import ControlLoop
from controlplane.operators import Operators
from controlplane.region_federation import RegionFederation
from controlplane.region_operators import RegionOperators
from controlplane.region_parts import is_seeded, peers_of, region_control_of
from controlplane.region_seeding import RegionSeeding
from controlplane.region_service import SERVICE_NAME as REGIONS
from controlplane.region_service import RegionServicer
from controlplane.rollouts.golden import (
    VOCABULARY_MIN,
    GoldenSet,
    GoldenSetError,
    Prompt,
    fixed_prompts,
)
from controlplane.rollouts.golden_schedule import GoldenSchedule
from controlplane.service import SERVICE_NAME as CONTROL_PLANE
from controlplane.service import ControlPlaneServicer
from controlplane.shadow_operators import ShadowOperators
from controlplane.shadow_service import SERVICE_NAME as SHADOWS
from controlplane.shadow_service import ShadowServicer
from controlplane.store.leader_lease import Identity
from controlplane.store.store import Store
from controlplane.streams import ReceiverStreams
from controlplane.warm_up_parts import warming_of
from controlplane.warm_up_service import SERVICE_NAME as WARM_UPS
from controlplane.warm_up_service import WarmUpServicer
from controlplane.warmup.hot_prefixes import PART_BYTES_MAX, TIMEOUT_S, collect
from controlplane.warmup.hot_record import HotQuestion, HotRecord
from controlplane.warmup.runner import WarmUpRunner
from controlplane.warmup.session import ANSWER_BYTES_MAX
from controlplane.watch import SERVICE_NAME as SNAPSHOTS
from controlplane.watch import SnapshotServicer
from kvmesh import process
from kvmesh.attach.dialing import Dialer
from kvmesh.clock import MonotonicClock, wall_ns
from kvmesh.config import ConfigError, MeshConfig
from kvmesh.control.v1 import (
    control_pb2_grpc,
    region_pb2_grpc,
    shadow_pb2_grpc,
    snapshot_pb2_grpc,
    warm_up_pb2_grpc,
)
from kvmesh.membership.address_filter import AddressFilter
from kvmesh.membership.member import Member
from kvmesh.membership.membership import Membership
from kvmesh.membership.region_claim import RegionClaim
from kvmesh.metrics import Metrics
from kvmesh.metrics_port import exposed
from kvmesh.pools import pool_names, pool_settings, version_names, version_settings
from kvmesh.redis_link import RedisLink
from kvmesh.request_reader import RequestReader, export_request_reader
from kvmesh.roles import CONTROL
from kvmesh.server import MeshServer, ServerLimits
from kvmesh.service_options import ServiceOptions
from kvmesh.snapshot.dialing import ControlDialer
from kvmesh.snapshot.initial import initial_content
from kvmesh.tasks import end
from kvmesh.telemetry import tracing_of
from kvmesh.trust.networks import Networks
from kvmesh.trust.peers import EXPIRES, Trust

log = logging.getLogger(__name__)

MESSAGE_BYTES_MAX: Final = 4 << 20
"""Largest message: a hello with the largest snapshot, or a batch of observations."""

KEEPALIVE_S: Final = 3.0
"""Time between two pings of a caller. A lost host is found within nine seconds, before `watch.SILENCE_S`."""

STOP_S: Final = 3.0
"""Longest graceful shutdown."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal; return the exit status. 2: it could not start, and one sentence on stderr says why."""
    return process.main(
        CONTROL,
        lambda: control_options.parse(arguments, os.environ),
        lambda options: ControlProcess(options).serve(),
        (ConfigError, OSError),
    )


def _golden(config: MeshConfig) -> tuple[tuple[Prompt, ...], dict[str, GoldenSet]]:
    """Return the fixed golden prompts, and the sets of versions that have their own. Raises ConfigError."""
    try:
        sets = golden_sets(version_settings(config, name) for name in version_names(config))
    except GoldenSetError as error:
        raise ConfigError(f"{error}") from error
    # Token ids below VOCABULARY_MIN exist in every vocabulary, so no tokenizer is loaded.
    return fixed_prompts(VOCABULARY_MIN, config.engine.max_sequence_tokens), sets


def wall_s() -> float:
    """Return Unix time, for documents and people."""
    return wall_ns() / 1e9


class ControlProcess:
    """One control process, built but not started: `serve` opens its sockets, leases and tasks."""

    def __init__(self, options: ServiceOptions) -> None:
        """Read certificates and golden sets. Raises ConfigError."""
        config = options.config
        self.options = options
        self.boot_id = secrets.token_hex(8)
        self.clock = MonotonicClock()
        self.trust = Trust(config, CONTROL)
        self.redis = RedisLink(options.redis_url)
        self.metrics = Metrics(CONTROL)
        self.metrics.gauge("certificate_expires_seconds", EXPIRES, self.trust.expires_s)
        self.tracing = tracing_of(config.telemetry, CONTROL, options.process_id)
        self.streams = ReceiverStreams()
        prompts, sets = _golden(config)
        self.golden = GoldenSchedule(prompts, sets)
        self.core = ControlCore(
            options.process_id,
            self.boot_id,
            {name: pool_settings(config, name).version.name for name in pool_names(config)},
            initial_content(config),
            wall_s,
            self.golden,
            warming=warming_of(config, prompts, sets, wall_s),
            regions=region_control_of(config, wall_s),
            models={name: version_settings(config, name).model for name in version_names(config)},
        )
        self.operators = Operators(self.core, wall_s, frozenset(sets))
        networks = Networks(config.trust.networks)
        dialer = self._dialer = Dialer(self.clock, networks)
        dialer.export(self.metrics)
        self._networks = networks
        self._address_filter = AddressFilter(networks)
        self.metrics.total(
            "refused_members",
            "Members refused for an address outside trust.networks.",
            lambda: self._address_filter.refused_total,
        )
        open_channel = partial(self.trust.channel, message_bytes_max=ANSWER_BYTES_MAX)
        self._runner = GoldenRunner(options.process_id, self.boot_id, self.clock, open_channel, dialer)
        self._warm_up = WarmUpRunner(
            options.process_id, self.boot_id, self.clock, open_channel, dialer, self._ask_hot
        )
        self._reader = RequestReader(MESSAGE_BYTES_MAX, clock=self.clock)
        export_request_reader(self.metrics, self._reader)
        self.server = MeshServer(
            CONTROL,
            options.process_id,
            (SNAPSHOTS, CONTROL_PLANE, WARM_UPS, SHADOWS, REGIONS),
            credentials=self.trust.server_credentials(),
            keepalive_s=KEEPALIVE_S,
            guards=self.trust.guards(),
            limits=ServerLimits(message_bytes_max=MESSAGE_BYTES_MAX),
            request_reader=self._reader,
        )

    async def serve(self) -> None:
        """Join the mesh and serve until a signal. Then give the leadership back.

        Raises ListenError, or ConfigError if Redis belongs to another region.
        """
        service, mesh = self.options, self.options.config.mesh.name
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.close)
            claim = RegionClaim(self.redis, mesh, service.config.region.name)
            if fault := await claim.fault_if_reachable():
                raise ConfigError(fault)
            metrics_address = await stack.enter_async_context(
                exposed(self.metrics, lambda: self.server.unready_reason, service.host, service.metrics_port)
            )
            self.metrics.process_gauges()
            store = Store(
                self.redis,
                mesh,
                Identity(service.process_id, self.boot_id, ""),
                control_options.state_folder(service),
                service.config.region.name,
            )
            loop = ControlLoop(
                self.core,
                store,
                self.streams,
                self.clock,
                service.process_id,
                self._run_golden,
                self._warm_up.run,
            )
            self._add_services(loop)
            address = service.advertise.address(await self.server.listen(service.listen))
            store.identify(Identity(service.process_id, self.boot_id, address))
            telemetry.export(loop, self.metrics, self.clock)
            stack.push_async_callback(loop.close)
            await store.load()
            self.core.warming.on_stored(store.loaded_aids, is_leader=False)
            await self._run(loop, metrics_address)

    async def close(self) -> None:
        """Close the resources that the constructor opened."""
        self.tracing.close()
        await self.redis.close()

    async def _ask_hot(self, question: HotQuestion, region: str = "") -> HotRecord:
        """Ask routers for hot prompts. `region`: the own region, where the routers are of another one."""
        return await collect(
            question.routers,
            partial(self.trust.channel, message_bytes_max=PART_BYTES_MAX),
            model_version=question.model_version,
            block_tokens=question.block_tokens,
            block_count_max=question.blocks_max,
            tenant_count_min=question.tenants_min,
            dialer=self._dialer,
            timeout_s=min(TIMEOUT_S, question.timeout_s),
            region=region,
        )

    async def _run_golden(self, run: RunGolden) -> None:
        await self._runner.run_for(self.golden, run)

    def _add_services(self, loop: ControlLoop) -> None:
        mesh = self.options.config.mesh.name if self.trust.is_on else ""
        snapshot_pb2_grpc.add_SnapshotServiceServicer_to_server(
            SnapshotServicer(loop, self._reader, self.clock, mesh), self.server.grpc
        )
        control_pb2_grpc.add_ControlPlaneServiceServicer_to_server(
            ControlPlaneServicer(loop, self.operators, self.options.process_id, self.clock, wall_s),
            self.server.grpc,
        )
        warm_up_pb2_grpc.add_WarmUpServiceServicer_to_server(
            WarmUpServicer(loop, self.clock, wall_s), self.server.grpc
        )
        shadow_pb2_grpc.add_ShadowServiceServicer_to_server(
            ShadowServicer(loop, ShadowOperators(self.core, wall_s), self.clock, wall_s), self.server.grpc
        )
        if (regions := self.core.regions) is not None:
            operators = RegionOperators(self.core, regions, wall_s)
            region_pb2_grpc.add_RegionServiceServicer_to_server(
                RegionServicer(loop, regions, operators, self._reader, self.clock, wall_s), self.server.grpc
            )

    def _federation(self, loop: ControlLoop) -> Iterable[tuple[str, Coroutine[Any, Any, None]]]:
        """Return the tasks of the federation. None in a mesh without regions."""
        if self.core.regions is None:
            return ()
        config = self.options.config
        dial = ControlDialer(self.trust, self.clock, self._networks)
        federation = RegionFederation(
            *(loop, self.core.regions, peers_of(config), dial, self.redis, config.mesh.name, self.clock)
        )
        if not is_seeded(config):
            return federation.background()
        seeding = RegionSeeding(
            loop,
            self.core.regions,
            partial(self._ask_hot, region=config.region.name),
            self._warm_up.run,
            self.clock,
        )
        return (*federation.background(), *seeding.background())

    async def _run(self, loop: ControlLoop, metrics_address: str) -> None:
        config = self.options.config

        def on_members(members: list[Member]) -> None:
            self.core.on_members(members, self.clock.now_s())
            loop.touch()

        membership = Membership(self.redis, config.mesh.name, on_members, address_filter=self._address_filter)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(work, name=name)
                for name, work in (
                    *loop.background(),
                    *self._federation(loop),
                    ("membership", membership.run()),
                )
            ]
            try:
                await self.server.set_serving(True)
                log.info("serving", extra={"address": self.server.address})
                self.server.announce(metrics_address)
                await self.server.run(loop.release, STOP_S)
            finally:
                await end(running)
