"""The decode.v1 service: reports the state of the replica."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from kvmesh.decode.v1 import decode_pb2 as pb
from kvmesh.decode.v1 import decode_pb2_grpc
from kvmesh.replica.process import Parts
from services.decode.core import DecodeCore

SERVICE_NAME = "kvmesh.decode.v1.DecodeService"


class DecodeStatus(decode_pb2_grpc.DecodeServiceServicer):
    """Reads the core; changes nothing."""

    def __init__(self, core: DecodeCore, parts: Parts) -> None:
        self._core = core
        self._parts = parts

    async def GetStatus(  # named by the protocol
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetStatusResponse:
        """See decode.proto."""
        core, parts = self._core, self._parts
        return pb.GetStatusResponse(
            replica=core.replica,
            load_report=core.load_report(parts.clock.now_s()),
            stream_count=parts.attach.stream_count,
            slot_count=len(core.slot_table.slots),
            pending_slot_count=core.slot_table.pending_count(),
            orphan_count=core.slot_table.detached_count(),
            engine_call_count=parts.engine.open_calls(),
            task_count=len(asyncio.all_tasks()),
            capabilities=core.capability_names(),
            adoption_total=core.takeover_total,
            log_bytes=core.slot_table.log_bytes(),
            state=core.life.state.value,
        )
