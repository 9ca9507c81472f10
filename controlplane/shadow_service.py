"""ShadowService: translates requests about shadow traffic into commands of the core, and its documents into reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from controlplane.command_runs import CommandRuns, Context
from controlplane.core import ControlCore
from controlplane.loop import ControlLoop
from controlplane.operators import unknown_name
from controlplane.shadow import report
from controlplane.shadow.document import DIFFERENCES_MAX, ShadowDocument
from controlplane.shadow_operators import ShadowOperators
from controlplane.store.shadow_documents import name_at
from kvmesh.clock import Clock
from kvmesh.control.v1 import shadow_pb2 as pb
from kvmesh.control.v1 import shadow_pb2_grpc
from kvmesh.errors import MeshError, Violation, invalid

SERVICE_NAME: Final = "kvmesh.control.v1.ShadowService"


class ShadowServicer(shadow_pb2_grpc.ShadowServiceServicer):
    """See shadow.proto. A follower redirects commands, and answers reads by the documents that it has read."""

    def __init__(
        self, loop: ControlLoop, operators: ShadowOperators, clock: Clock, wall: Callable[[], float]
    ) -> None:
        self._core: ControlCore = loop.core
        self._operators = operators
        self._runs = CommandRuns(loop, clock)
        self._wall = wall

    async def StartShadow(self, request: pb.StartShadowRequest, context: Context) -> pb.StartShadowResponse:
        self._runs.check_leads()
        shadows = self._core.shadows
        name = name_at(self._wall(), (each.id for each in shadows.all))
        prepared, order = self._operators.start(request, self._runs.author(context), name)
        await self._runs.run(prepared, context, is_trial=request.validate_only)
        document = shadows.get(order.id) or ShadowDocument(order=order)
        return pb.StartShadowResponse(shadow=report.view(document, shadows.all))

    async def GetShadow(self, request: pb.GetShadowRequest, context: Context) -> pb.GetShadowResponse:
        if request.difference_count > DIFFERENCES_MAX:
            raise invalid(
                "FIELD_OUT_OF_RANGE",
                [Violation("difference_count", str(request.difference_count), f"0 to {DIFFERENCES_MAX}")],
            )
        return pb.GetShadowResponse(shadow=self._view(request.shadow, request.difference_count))

    async def StopShadow(self, request: pb.StopShadowRequest, context: Context) -> pb.StopShadowResponse:
        self._runs.check_leads()
        was_running = self._core.library.desired.shadow is not None
        if was_running:
            prepared = self._operators.stop(request)
            await self._runs.run(prepared, context, is_trial=request.validate_only)
        has_any = bool(self._core.shadows.all)
        return pb.StopShadowResponse(shadow=self._view("", 0) if has_any else None, was_running=was_running)

    def _view(self, name: str, difference_count: int) -> pb.ShadowView:
        shadows = self._core.shadows
        found = shadows.get(name)
        if found is None and name:
            raise unknown_name("shadow", name, "no shadow has that id; ids are of the last seven days")
        if found is None:
            raise MeshError("NO_SHADOW", "no shadow has run in this mesh within seven days")
        return report.view(found, shadows.all, difference_count=difference_count)
