"""The prefill.v1 service: reports the state of the replica."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from kvmesh.prefill.v1 import prefill_pb2 as pb
from kvmesh.prefill.v1 import prefill_pb2_grpc
from kvmesh.replica.process import Parts
from services.prefill.core import PrefillCore

SERVICE_NAME = "kvmesh.prefill.v1.PrefillService"


class PrefillStatus(prefill_pb2_grpc.PrefillServiceServicer):
    """Reads the core; changes nothing."""

    def __init__(self, core: PrefillCore, parts: Parts) -> None:
        self._core = core
        self._parts = parts

    async def GetStatus(  # named by the protocol
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetStatusResponse:
        """See prefill.proto."""
        core, parts = self._core, self._parts
        return pb.GetStatusResponse(
            replica=core.replica,
            load_report=core.load_report(parts.clock.now_s()),
            stream_count=parts.attach.stream_count,
            slot_count=len(core.slot_table.slots),
            block_reserved_count=core.slot_table.blocks_reserved,
            engine_call_count=parts.engine.open_calls(),
            task_count=len(asyncio.all_tasks()),
            capabilities=core.facts.capabilities.names(),
            computed_token_total=core.prefilling.computed_token_total,
            cached_token_total=core.prefilling.cached_token_total,
            state=core.life.state.value,
        )
