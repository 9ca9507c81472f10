"""The decode process: config -> engine -> core -> serve -> drain."""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.clock import MonotonicClock
from kvmesh.decode.v1 import decode_pb2_grpc
from kvmesh.membership.member import Member
from kvmesh.metrics import Metrics
from kvmesh.replica import process
from kvmesh.replica.kv_sources import KvSources
from kvmesh.replica.options import ReplicaOptions
from kvmesh.replica.process import RoleService
from kvmesh.telemetry import Tracing
from kvmesh.triton.capabilities import ModelFacts
from services.decode import telemetry
from services.decode.core import DecodeCore
from services.decode.limits import DecodeLimits
from services.decode.status import SERVICE_NAME, DecodeStatus


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal; return the exit status."""
    return process.main("decode", _build, arguments)


def _build(options: ReplicaOptions, facts: ModelFacts, metrics: Metrics, tracing: Tracing) -> RoleService:
    config = options.config.decode
    limits = DecodeLimits(
        slots_max=config.slots_max,
        detached_s=config.detached_s,
        slow_reader_s=config.slow_reader_s,
        coalesce_max_s=config.coalesce_max_ms / 1000,
    )
    pool, clock = options.pool_settings, MonotonicClock()
    sources = KvSources(pool.name, pool.version.name)
    core = DecodeCore(
        options.process_id, facts, limits, sources.allows, telemetry.CallTelemetry(metrics, tracing)
    )
    telemetry.export(core, metrics)

    def on_members(members: list[Member]) -> None:
        sources.take(members, clock.now_s())
        core.on_sources(sources.boots)

    return RoleService(
        core=core,
        service_name=SERVICE_NAME,
        add_service=lambda server, parts: decode_pb2_grpc.add_DecodeServiceServicer_to_server(
            DecodeStatus(core, parts), server
        ),
        on_members=on_members,
    )
