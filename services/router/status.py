"""The router.v1 service: a snapshot of the router's replicas, queue, index and estimates; hot prefixes."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from kvmesh.attach.server import AttachService
from kvmesh.clock import Clock
from kvmesh.redis_link import RedisLink
from kvmesh.router.v1 import router_pb2 as pb
from kvmesh.router.v1 import router_pb2_grpc
from services.router.forwarding.attempt import Attempt
from services.router.forwarding.core import ForwardingCore
from services.router.forwarding.replicas import Replica
from services.router.hot.listing import HotPrefixListing
from services.router.placement.cost_policy import CostPolicy

SERVICE_NAME = "kvmesh.router.v1.RouterService"


class RouterStatus(router_pb2_grpc.RouterServiceServicer):
    """Serves GetStatus from the core, and ListHotPrefixes from `hot`. Read-only."""

    def __init__(
        self,
        core: ForwardingCore,
        policy: CostPolicy,
        attach: AttachService,
        redis: RedisLink,
        clock: Clock,
        hot: HotPrefixListing,
    ) -> None:
        self._core = core
        self._policy = policy
        self._attach = attach
        self._redis = redis
        self._clock = clock
        self._hot = hot

    async def GetStatus(  # named by the protocol
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetStatusResponse:
        """See router.proto."""
        core, local_index = self._core, self._policy.local_index
        now_s = self._clock.now_s()
        return pb.GetStatusResponse(
            router=core.router,
            replicas=[self._view(replica, now_s) for _, replica in sorted(core.replicas.items())],
            queued_request_count=len(core.queue),
            relayed_request_count=core.placed_count,
            orphan_count=core.attempts.detached_count,
            index_block_count=local_index.block_count,
            overlay_block_count=local_index.in_flight_block_count,
            stream_count=self._attach.stream_count,
            task_count=len(asyncio.all_tasks()),
            redis_connected=self._redis.is_connected,
            healed_block_total=local_index.repaired_block_total,
            ejection_total=core.ejection_total,
            prefill_costs=self._costs(),
        )

    async def ListHotPrefixes(  # type: ignore[override]  # named by the protocol; writes instead of yielding
        self, request: pb.ListHotPrefixesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """See router.proto."""
        await self._hot.answer(request, context.write)

    def _costs(self) -> pb.PrefillCosts:
        costs = self._policy.costs
        c0_s, a_s, b_s = costs.coefficients
        fewest, most = costs.uncached_span
        return pb.PrefillCosts(
            c0_s=c0_s,
            a_s=a_s,
            b_s=b_s,
            measured_prompt_count=costs.observation_total,
            fitted_prompt_count=costs.fitted_count,
            uncached_tokens_min=fewest,
            uncached_tokens_max=most,
        )

    def _view(self, replica: Replica[Attempt], now_s: float) -> pb.ReplicaView:
        is_prefill = replica.role == "prefill"
        view = pb.ReplicaView(
            replica=replica.name,
            role=pb.ReplicaView.ROLE_PREFILL if is_prefill else pb.ReplicaView.ROLE_DECODE,
            address=replica.address,
            placeable=replica.is_placeable(),
            index_block_count=self._policy.local_index.blocks_of(replica.name),
            queue_us=round(self._policy.queue_s(replica.name, now_s) * 1e6),
            dispatched_request_count=len(replica.slots),
            ejected=replica.ejection.is_ejected,
            failure_count=replica.ejection.failures,
            prefill_factor=(
                self._policy.speeds.factor(replica.name)
                if is_prefill
                else self._policy.local_speeds.factor(replica.name, now_s)
            ),
        )
        if replica.load.report is not None:
            view.load_report.CopyFrom(replica.load.report)
            view.load_report_age_ms = round(max(0.0, now_s - replica.load.reported_s) * 1000)
        return view
