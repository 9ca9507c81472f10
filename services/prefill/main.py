"""The prefill process: config -> engine -> core -> serve -> drain."""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.clock import MonotonicClock
from kvmesh.metrics import Metrics
from kvmesh.prefill.v1 import prefill_pb2_grpc
from kvmesh.queue_order import ORDERS
from kvmesh.replica import process
from kvmesh.replica.kv_sources import KvSources
from kvmesh.replica.options import ReplicaOptions
from kvmesh.replica.process import RoleService
from kvmesh.telemetry import Tracing
from kvmesh.triton.capabilities import ModelFacts
from services.prefill import telemetry
from services.prefill.core import PrefillCore
from services.prefill.limits import PrefillLimits
from services.prefill.status import SERVICE_NAME, PrefillStatus


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal; return the exit status."""
    return process.main("prefill", _build, arguments)


def _build(options: ReplicaOptions, facts: ModelFacts, metrics: Metrics, tracing: Tracing) -> RoleService:
    config = options.config
    limits = PrefillLimits(
        queue_max_requests=config.prefill.queue_max_requests,
        order_key=ORDERS[config.prefill.queue_order],
        engine_concurrency=config.prefill.engine_concurrency,
        handoff_timeout_s=config.engine.handoff_timeout_s,
        detached_s=config.decode.detached_s,
    )
    pool, clock = options.pool_settings, MonotonicClock()
    sources = KvSources(pool.name, pool.version.name)
    record = telemetry.CallTelemetry(metrics, tracing)
    core = PrefillCore(options.process_id, facts, limits, record, is_source=sources.allows)
    telemetry.export(core, metrics)
    return RoleService(
        core=core,
        service_name=SERVICE_NAME,
        add_service=lambda server, parts: prefill_pb2_grpc.add_PrefillServiceServicer_to_server(
            PrefillStatus(core, parts), server
        ),
        on_members=lambda members: sources.take(members, clock.now_s()),
    )
