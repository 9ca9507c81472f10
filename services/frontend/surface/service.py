"""The servicer of Generate: identifies the caller, reads the request, reserves budget, submits to the core, streams.

Effects only; decisions are in `FrontendCore`, `Intake` and `Accounting`. INVARIANT: admission slot, reservation and
execution name of a request are released on every way out.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeAlias

import grpc

from kvmesh.call import Call, GrpcCall
from kvmesh.clock import Clock, wall_ns, wall_s
from kvmesh.errors import MeshError
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.telemetry import Tracing
from kvmesh.tenants.caller import Caller
from services.frontend.accounts.accounting import Accounting, Hold
from services.frontend.requests import faults
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.request import LiveRequest
from services.frontend.surface import wire
from services.frontend.surface.answer import Answer, Message
from services.frontend.surface.call_reader import METHOD, CallReader
from services.frontend.surface.intake import Arrival, Intake
from services.frontend.surface.messages import Messages
from services.frontend.surface.model_listing import ModelListing
from services.frontend.surface.request_trace import RequestTrace
from services.frontend.surface.slow_reader import SlowReaderTimeout
from services.frontend.surface.turn_writer import DirectWriter, TurnWriter

log = logging.getLogger(__name__)

SERVICE_NAME: Final = "kvmesh.inference.v1.InferenceService"

BIND_AFTER_S: Final = 5.0
"""Longest time from the admission of a request to its `started`, in a mesh with several pools or versions.

The failure detector finds a frozen router in this time, so that its requests can still move.
"""

RETRY_JITTER: Final = 0.2
"""RetryInfo is up to this share longer than the estimate (jitter): clients that were refused together come back apart."""


Translate: TypeAlias = Callable[[bytes], Awaitable[bytes]]
"""Returns a message of another surface as a GenerateRequest. Raises MeshError."""


class Admitted(NamedTuple):
    """An admitted request, its reader, and its reservation."""

    request: LiveRequest
    reader: SlowReaderTimeout
    hold: Hold


class InferenceService:
    """Serves kvmesh.inference.v1.

    `on_refused` counts calls that never became an admitted request, with the caller if it is known. `chance()` returns a
    random number in [0, 1).
    """

    def __init__(
        self,
        core: FrontendCore,
        calls: CallReader,
        intake: Intake,
        accounting: Accounting,
        messages: Messages,
        tracing: Tracing,
        clock: Clock,
        *,
        listing: ModelListing,
        on_refused: Callable[[MeshError, Caller | None], None] = lambda _, __: None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._core = core
        self.calls = calls
        self._intake = intake
        self._accounting = accounting
        self._messages = messages
        self._tracing = tracing
        self._clock = clock
        self.tap: Callable[[LiveRequest], None] | None = None
        """Takes each admitted request, for shadow traffic. It raises nothing. None: no shadow is in force."""
        self._on_refused = on_refused
        self._chance = chance
        self.listing = listing
        self._turns = TurnWriter(_call_soon, clock.now_s)

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to `server`. Requests arrive as bytes, so that a bad one gets a better answer than gRPC's.

        The method takes a stream of requests and uses the first. The message is thus read after the headers were checked
        (decision 0022).
        """
        handler = grpc.stream_stream_rpc_method_handler(
            self.Generate,
            request_deserializer=None,
            response_serializer=pb.GenerateResponse.SerializeToString,
        )
        # Registered methods have a queue of their own, apart from calls of methods that do not exist.
        methods = {
            METHOD: handler,
            "ListModels": grpc.unary_unary_rpc_method_handler(
                self.ListModels,
                request_deserializer=pb.ListModelsRequest.FromString,
                response_serializer=pb.ListModelsResponse.SerializeToString,
            ),
            "GetModel": grpc.unary_unary_rpc_method_handler(
                self.GetModel,
                request_deserializer=pb.GetModelRequest.FromString,
                response_serializer=pb.GetModelResponse.SerializeToString,
            ),
        }
        server.add_registered_method_handlers(SERVICE_NAME, methods)  # type: ignore[attr-defined]  # stubs lack it

    async def ListModels(
        self, _: pb.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListModelsResponse:
        """See inference.proto. Raises MeshError."""
        self.calls.caller(GrpcCall(context))
        return self.listing.all()

    async def GetModel(
        self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetModelResponse:
        """See inference.proto. Raises MeshError."""
        self.calls.caller(GrpcCall(context))
        return self.listing.one(request.model)

    async def Generate(
        self, _: object, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:  # named by the protocol
        """See inference.proto."""
        await self.serve(GrpcCall(context))

    async def serve(
        self, call: Call[bytes, Any], *, is_bare: bool = False, translate: Translate | None = None
    ) -> None:
        """Serve one call. Raises MeshError with the call's status.

        `is_bare`: output is written as BareTokens, and not as a message with `tokens`. There is no resume token.
        `translate(message)` returns a message of another surface as a GenerateRequest. None: it is one.
        """
        try:
            await self._serve(call, is_bare=is_bare, translate=translate)
        except MeshError as error:
            if error.retry_after_s is not None:
                error.retry_after_s *= 1 + RETRY_JITTER * self._chance()
            raise

    async def _serve(self, call: Call[bytes, Message], *, is_bare: bool, translate: Translate | None) -> None:
        # All three are taken at the same time, because the message may take seconds to arrive.
        arrived_s, arrived_ns, remaining_s = self._clock.now_s(), wall_ns(), call.remaining_s()
        caller: Caller | None = None
        try:
            caller = self.calls.caller(call)
            self._core.regions.check(caller.tenant)
            self._core.check_capacity(arrived_s)
            data = await self.calls.message(call, caller)
            if translate is not None:
                with self._core.capacity_to_read(self._clock.now_s()):
                    data = await translate(data)
            if remaining_s is None and (left_s := call.remaining_s()) is not None:
                # A deadline in the message counts from the arrival of the call, as one in the headers does.
                remaining_s = left_s + self._clock.now_s() - arrived_s
            if caller.account.scopes and not wire.may_resume(data):
                self._accounting.check(caller)
        except MeshError as error:
            self._on_refused(error, caller)
            raise
        trace = RequestTrace(self._tracing, call, arrived_ns)
        arrival = self._intake.arrival(call, caller, arrived_s, remaining_s, trace.traceparent)
        admitted = await self._admit(data, arrival)
        if self._intake.reads_once:
            data = b""
        while not await self._attend(call, admitted, trace, is_bare=is_bare):
            # Its pool was lost before `started`, and the version of the other pool has another tokenizer.
            arrival = self._intake.again(arrival, admitted.request)
            admitted = await self._admit(data, arrival)

    async def _admit(self, data: bytes, arrival: Arrival) -> Admitted:
        """Read the request in `data`, reserve its budget, and submit it. Raises MeshError."""
        hold = Hold()
        try:
            with self._core.capacity_to_read(self._clock.now_s()):
                spec = await self._intake.read(data, arrival)
                spec = await self._accounting.reserve(hold, spec)
            output, reader = self._messages.output(spec), SlowReaderTimeout(self._clock)
            request = self._core.submit(spec, output, reader.on_ready, self._clock.now_s())
            if self.tap is not None:
                self.tap(request)
        except BaseException as error:
            self._intake.forget(arrival.owner)
            self._accounting.release(hold)
            if isinstance(error, MeshError):
                self._on_refused(error, arrival.caller)
            raise
        return Admitted(request, reader, hold)

    async def _attend(
        self,
        call: Call[bytes, Message],
        admitted: Admitted,
        trace: RequestTrace,
        *,
        is_bare: bool,
    ) -> bool:
        """Stream the answer of an admitted request. Return False if it ended unanswered, to be read again.

        Raises MeshError.
        """
        request, reader, hold = admitted
        remaining: Mapping[str, str] = {}
        self._core.admitted.attend(request)
        try:
            reader.follow(request)
            remaining = hold.trailers()
            if remaining:
                call.set_trailers(remaining)
            await self._bind(request, reader.ready)
            if not request.must_reread:
                await self._stream(call, request, reader, hold, is_bare=is_bare)
        except MeshError as error:
            error.trailers = {**remaining, **error.trailers}
            raise
        finally:
            now_s = self._clock.now_s()
            reader.close()
            try:
                self._core.leave(request, now_s, was_deadline=now_s >= request.spec.timing.deadline_s)
            finally:
                self._core.admitted.dismiss(request, now_s)
                self._intake.forget(request.spec.execution.owner)
                self._accounting.close(hold, request)
            if not request.must_reread:
                trace.record(request)
        return not request.must_reread

    async def _bind(self, request: LiveRequest, ready: asyncio.Event) -> None:
        """Wait until `started` may be sent: it binds the request to its model version.

        In a mesh with several pools, a request without a token is unbound for BIND_AFTER_S, and may move to another pool.
        So it is between regions with different stable versions.
        """
        core, version = self._core, request.spec.model_version
        if request.may_move and (core.pools.has_several or core.regions.may_change_version(version)):
            with suppress(TimeoutError):
                async with asyncio.timeout(BIND_AFTER_S):
                    await ready.wait()
        request.is_bound = True

    async def _stream(
        self,
        call: Call[bytes, Message],
        request: LiveRequest,
        reader: SlowReaderTimeout,
        hold: Hold,
        *,
        is_bare: bool,
    ) -> None:
        """Write the waiting output as one message, then the output that accumulated during that write, until the end.

        While this task waits for output, the turn writer writes it if the transport takes it at once. Raises MeshError.
        """
        answer = Answer(request, reader, hold, self._core, self._accounting, self._messages, is_bare=is_bare)
        writer: DirectWriter[Message] = DirectWriter(answer, call.try_write, self._turns)
        request.on_ready = writer.on_ready
        ready = reader.ready
        try:
            started = self._messages.started(request.spec, wall_s(), has_token=not is_bare)
            await self._write(call, request, reader, writer, started)
            while True:
                message = writer.take_back() or answer.take()
                if message is not None:
                    await self._write(call, request, reader, writer, message)
                    answer.delivered(reader.wrote_s)
                elif request.outcome is None:
                    ready.clear()
                    writer.rest()
                    await ready.wait()
                elif request.outcome.error is not None:
                    raise request.outcome.error
                else:
                    break
            await self._write(call, request, reader, writer, self._messages.finished(request))
        except asyncio.CancelledError:
            if not reader.has_timed_out():
                raise
            raise faults.slow_reader(request.progress.delivered) from None
        except (grpc.aio.UsageError, grpc.aio.InternalError) as error:
            # The call ended during the write: the client is gone, and no status can reach it.
            log.debug("write failed", extra={"request_id": request.spec.request_id, "why": str(error)})
        finally:
            writer.close()
            request.on_ready = reader.on_ready  # no cycle of references keeps the request

    async def _write(
        self,
        call: Call[bytes, Message],
        request: LiveRequest,
        reader: SlowReaderTimeout,
        writer: DirectWriter[Message],
        message: Message,
    ) -> None:
        """Write `message`; note the time at which the transport got the message, and the time at which it took it all."""
        if not writer.try_write(message):
            request.progress.writing_since_s = self._clock.now_s()
            await call.write(message)
            request.progress.writing_since_s = None
        reader.wrote_s = self._clock.now_s()


def _call_soon(callback: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(callback)
