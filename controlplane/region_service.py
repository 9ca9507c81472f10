"""RegionService: the federation with other regions, and the commands and views of operators about regions.

Federate has one task that reads and one that writes for each stream. A process that does not lead says so and ends the
stream, so that the other region dials the next process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from controlplane import region_views
from controlplane.command_runs import CommandRuns, Context
from controlplane.core import ControlCore
from controlplane.loop import ControlLoop
from controlplane.region_control import RegionControl
from controlplane.region_operators import RegionOperators
from controlplane.regions.news import News, NewsError, of_message, to_message
from kvmesh.call import Call, GrpcCall
from kvmesh.clock import Clock
from kvmesh.control.v1 import region_pb2 as pb
from kvmesh.control.v1 import region_pb2_grpc
from kvmesh.errors import MeshError, Violation, invalid
from kvmesh.request_reader import RequestReader

log = logging.getLogger(__name__)

SERVICE_NAME: Final = "kvmesh.control.v1.RegionService"

SILENCE_S: Final = 10.0
"""A region that sends nothing, or takes nothing, for this long is cut off."""

BEGUN_POLL_S: Final = 0.05
"""Time between two looks at the end of a takeover."""

STREAMS_MAX: Final = 64
"""Open streams. A further one is refused."""

FederateCall = Call[pb.FederateRequest, pb.FederateResponse]


class RegionServicer(region_pb2_grpc.RegionServiceServicer):
    """See region.proto."""

    def __init__(
        self,
        loop: ControlLoop,
        regions: RegionControl,
        operators: RegionOperators,
        reader: RequestReader,
        clock: Clock,
        wall: Callable[[], float],
    ) -> None:
        self._loop = loop
        self._core: ControlCore = loop.core
        self._regions = regions
        self._operators = operators
        self._runs = CommandRuns(loop, clock)
        self._reader = reader
        self._clock = clock
        self._wall = wall
        self._streams = 0

    # Federation.

    async def Federate(self, request_iterator: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:  # type: ignore[override]  # named by the protocol; writes instead of yielding
        await self.federate(GrpcCall(context))

    async def federate(self, call: FederateCall) -> None:
        """Serve one stream until it ends. Raises MeshError."""
        first = await self._reader.message(call.read, (call.peer,))
        if first is None:
            return
        news = self._checked(first)
        leads = self._core.leads
        await call.write(
            pb.FederateResponse(is_leader=leads, leader_address=self._loop.hint().leader_address)
        )
        if not leads:
            return
        if self._streams >= STREAMS_MAX:
            raise MeshError(
                "CALLS_FULL", f"{STREAMS_MAX} regions are attached already", {"limit": str(STREAMS_MAX)}
            )
        self._streams += 1
        tasks = [
            asyncio.create_task(self._read(call, news), name="federate-read"),
            asyncio.create_task(self._write(call), name="federate-write"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._streams -= 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            error = task.exception()
            if isinstance(error, MeshError):
                raise error
            if error is not None and not isinstance(
                error, (TimeoutError, grpc.RpcError, grpc.aio.UsageError)
            ):
                raise error

    async def _read(self, call: FederateCall, news: News) -> None:
        while True:
            self._core.on_region_news(news, self._clock.now_s())
            self._loop.touch()
            async with asyncio.timeout(SILENCE_S):
                message = await call.read()
            if message is None:
                return
            news = self._checked(message)

    async def _write(self, call: FederateCall) -> None:
        while True:
            await self._takeover()  # until its end a peer knows this region better
            if not self._core.leads:
                return
            async with asyncio.timeout(SILENCE_S):
                await call.write(pb.FederateResponse(news=to_message(self._news())))
            await asyncio.sleep(self._regions.settings.signals_every_s)

    def _news(self) -> News:
        return self._regions.news(self._core.leadership.term.number, self._clock.now_s())

    def _checked(self, message: pb.FederateRequest) -> News:
        """Return the news of a peer. Raises MeshError for a fault, the own region, or an unknown region."""
        try:
            news = of_message(message.news)
        except NewsError as error:
            raise invalid("FIELD_OUT_OF_RANGE", [Violation("news", "out of range", str(error))]) from None
        others = sorted(self._regions.regions.targets)
        if news.region not in others:
            raise invalid(
                "FIELD_OUT_OF_RANGE", [Violation("news.region", news.region, f"one of {', '.join(others)}")]
            )
        return news

    # Operators.

    async def _until_begun(self) -> None:
        """Wait for the end of a takeover: until then this process does not know what is declared. Raises MeshError."""
        await self._takeover()
        self._runs.check_leads()

    async def _takeover(self) -> None:
        """Return at the end of a takeover, or once this process does not lead."""
        while self._core.leads and not self._regions.is_begun:
            await asyncio.sleep(BEGUN_POLL_S)

    async def ListRegions(self, request: pb.ListRegionsRequest, context: Context) -> pb.ListRegionsResponse:
        await self._until_begun()
        answered = Timestamp()
        answered.FromMilliseconds(round(self._wall() * 1000))
        now_s = self._clock.now_s()
        return pb.ListRegionsResponse(regions=region_views.views(self._regions, now_s), answered=answered)

    async def DrainRegion(self, request: pb.DrainRegionRequest, context: Context) -> pb.DrainRegionResponse:
        await self._until_begun()
        now_s = self._clock.now_s()
        prepared = self._operators.drain(request, self._runs.author(context))
        forecast = self._operators.forecast(now_s)
        await self._runs.run(prepared, context, is_trial=request.validate_only)
        return pb.DrainRegionResponse(
            region=self._view(request.region),
            forecast=region_views.forecast_rows(self._regions, forecast),
            ending_stream_count=self._operators.ending_streams(),
            overridden=prepared.overridden,
        )

    async def RestoreRegion(
        self, request: pb.RestoreRegionRequest, context: Context
    ) -> pb.RestoreRegionResponse:
        await self._until_begun()
        prepared = self._operators.restore(request, self._runs.author(context))
        await self._runs.run(prepared, context, is_trial=request.validate_only)
        return pb.RestoreRegionResponse(region=self._view(request.region))

    async def AvoidRegion(self, request: pb.AvoidRegionRequest, context: Context) -> pb.AvoidRegionResponse:
        await self._until_begun()
        prepared = self._operators.avoid(request, self._runs.author(context))
        await self._runs.run(prepared, context, is_trial=request.validate_only)
        return pb.AvoidRegionResponse(region=self._view(request.region))

    def _view(self, region: str) -> pb.RegionView | None:
        found = region_views.views(self._regions, self._clock.now_s())
        return next((each for each in found if each.region == region), None)
