"""The client's side of the frontend: Generate over a Call. Identifies, translates, reserves, submits to the core, streams.

A shell: no decision is taken here. Whatever was taken for a request is given back on every way out.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc

from kvmesh.call import Call, GrpcCall
from kvmesh.clock import Clock, wall_ns, wall_s
from kvmesh.errors import MeshError
from kvmesh.fair_queue import Path
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.request_reader import RequestReader, no_message
from kvmesh.telemetry import TraceContext, Tracing, format_traceparent
from kvmesh.tenants.caller import Caller
from services.frontend.accounts.accounting import Accounting, Hold
from services.frontend.accounts.executions import Executions
from services.frontend.requests import faults
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.detokenizer import Detokenizer
from services.frontend.requests.output import Output
from services.frontend.requests.request import LiveRequest
from services.frontend.requests.resume_token import Seal
from services.frontend.requests.takeover import Place
from services.frontend.surface import messages, wire
from services.frontend.surface.intake import Arrival, Intake
from services.frontend.surface.slow_reader import Reader
from services.frontend.surface.tokenizer import ModelTokenizer

log = logging.getLogger(__name__)

SERVICE_NAME: Final = "kvmesh.inference.v1.InferenceService"

RETRY_JITTER: Final = 0.2
"""RetryInfo is up to this share longer than what was reckoned: clients that were refused together come back apart."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Who serves."""

    frontend: str
    """Name of this process."""
    region: str


class InferenceService:
    """Serves kvmesh.inference.v1.

    `identify` tells who calls, or raises MeshError. `is_seeded()` tells whether all engines of the mesh make the same
    tokens wherever they run. `on_refused` counts what never became a live request, with its caller if one is known.
    `chance()` returns a random number in [0, 1).
    """

    def __init__(
        self,
        core: FrontendCore,
        reception: RequestReader,
        intake: Intake,
        accounting: Accounting,
        identify: Callable[[Call[Any, Any]], Caller],
        tokenizer: ModelTokenizer,
        terms: Terms,
        clock: Clock,
        tracing: Tracing,
        seal: Seal,
        executions: Executions,
        *,
        is_seeded: Callable[[], bool] = lambda: True,
        on_refused: Callable[[MeshError, Caller | None], None] = lambda _, __: None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._core = core
        self._reception = reception
        self._intake = intake
        self._accounting = accounting
        self._identify = identify
        self._tokenizer = tokenizer
        self._terms = terms
        self._clock = clock
        self._tracing = tracing
        self._seal = seal
        self._executions = executions
        self._is_seeded = is_seeded
        self._on_refused = on_refused
        self._chance = chance

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to `server`. Requests arrive as bytes: a bad one must get a better answer than gRPC's.

        As a stream of requests, of which the first counts: so it is read when the headers have been looked at.
        """
        handler = grpc.stream_stream_rpc_method_handler(
            self.Generate,
            request_deserializer=None,
            response_serializer=pb.GenerateResponse.SerializeToString,
        )
        # Registered: calls of methods that do not exist wait in another line.
        server.add_registered_method_handlers(SERVICE_NAME, {"Generate": handler})  # type: ignore[attr-defined]  # stubs lack it

    async def Generate(
        self, _: object, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:  # named by the protocol
        """See inference.proto."""
        await self.serve(GrpcCall(context))

    async def serve(self, call: Call[bytes, pb.GenerateResponse]) -> None:
        """Serve one call. Raises MeshError with the call's status."""
        try:
            await self._serve(call)
        except MeshError as error:
            if error.retry_after_s is not None:
                error.retry_after_s *= 1 + RETRY_JITTER * self._chance()
            raise

    async def _serve(self, call: Call[bytes, pb.GenerateResponse]) -> None:
        # All three of one moment: the message may take seconds to arrive.
        arrived_s, arrived_ns, remaining_s = self._clock.now_s(), wall_ns(), call.remaining_s()
        caller: Caller | None = None
        owner, hold = "", Hold()
        try:
            caller = self._identify(call)
            self._core.check_room(arrived_s)
            data = await self._reception.message(call.read, _path(caller, call))
            if data is None:
                raise no_message("Generate")
            if caller.account.scopes and not wire.may_resume(data):
                self._accounting.check(caller)
            with self._core.place_to_read(self._clock.now_s()):
                client = self._tracing.begin(call.metadata.get("traceparent"))
                context, owner = self._tracing.child(client), self._executions.new_owner()
                arrival = Arrival.of(call, caller, arrived_s, remaining_s, owner, format_traceparent(context))
                order = await self._intake.read(data, arrival)
                order = await self._accounting.reserve(hold, order)
            del data
            output = Output(
                Detokenizer(self._tokenizer.token_bytes), order.stop, with_logprobs=order.logprobs
            )
            reader = Reader(self._clock)
            request = self._core.submit(order, output, reader.on_ready, self._clock.now_s())
        except BaseException as error:
            self._executions.forget(owner)
            self._accounting.release(hold)
            if isinstance(error, MeshError):
                self._on_refused(error, caller)
            raise
        remaining: Mapping[str, str] = {}
        self._core.live.attend(request)
        try:
            reader.follow(request)
            remaining = hold.trailers()
            if remaining:
                call.set_trailers(remaining)
            await self._stream(call, request, reader, hold)
        except MeshError as error:
            error.trailers = {**remaining, **error.trailers}
            raise
        finally:
            now_s = self._clock.now_s()
            reader.close()
            try:
                self._core.leave(request, now_s, was_deadline=now_s >= order.deadline_s)
            finally:
                self._core.live.dismiss(request, now_s)
                self._executions.forget(owner)
                self._accounting.close(hold, request)
            self._record(request, context, client.span_id, arrived_ns)

    async def _stream(
        self, call: Call[bytes, pb.GenerateResponse], request: LiveRequest, reader: Reader, hold: Hold
    ) -> None:
        """Write what is there as one message, then what piled up meanwhile, until the end. Raises MeshError."""
        output, place, progress_at = request.output, None, hold.progress_at
        ready = reader.ready
        try:
            await self._write(call, request, reader, messages.started(request.order, self._seal, wall_s()))
            while True:
                tokens = output.take()
                if tokens is not None:
                    position = output.taken
                    place = self._tell_place(tokens, request, place)
                    await self._write(call, request, reader, pb.GenerateResponse(tokens=tokens))
                    self._core.deliver(request, position, reader.wrote_s)
                    if position >= progress_at:
                        progress_at = self._accounting.progress(hold, position)
                elif request.end is None:
                    ready.clear()
                    await ready.wait()
                elif request.end.error is not None:
                    raise request.end.error
                else:
                    break
            terms = self._terms
            end = messages.finished(request, terms.frontend, terms.region, is_seeded=self._is_seeded())
            await self._write(call, request, reader, end)
        except asyncio.CancelledError:
            if not reader.was_cut():
                raise
            raise faults.slow_reader(request.progress.delivered) from None
        except (grpc.aio.UsageError, grpc.aio.InternalError) as error:
            # The call ended under the write: the client is gone, and nobody reads a status.
            log.debug("write failed", extra={"request_id": request.order.request_id, "why": str(error)})

    async def _write(
        self,
        call: Call[bytes, pb.GenerateResponse],
        request: LiveRequest,
        reader: Reader,
        message: pb.GenerateResponse,
    ) -> None:
        """Write `message`; note since when the transport has held it, and when it had taken it."""
        request.progress.writing_since_s = self._clock.now_s()
        await call.write(message)
        request.progress.writing_since_s = None
        reader.wrote_s = self._clock.now_s()

    def _tell_place(self, tokens: pb.Tokens, request: LiveRequest, told: Place | None) -> Place | None:
        """Put the resume token into `tokens` if the request runs elsewhere than the client knows; return the place."""
        place = request.place
        if place is None or place == told:
            return told
        tokens.resume_token = messages.newer_token(request.order, place, self._seal, wall_s())
        return place

    def _record(
        self, request: LiveRequest, context: TraceContext, caller_span_id: int, arrived_ns: int
    ) -> None:
        """Record the request's span, if it is traced, and log what did not end well."""
        end = request.end
        assert end is not None
        if end.error is not None and end.error.reason != "CLIENT_GONE":
            log.info(
                "request failed",
                extra={
                    "request_id": request.order.request_id,
                    "outcome": end.outcome,
                    "faults": [attempt.fault for attempt in request.attempts],
                    "tokens": len(request.progress.ids),
                },
            )
        if not context.sampled:
            return
        self._tracing.record_span(
            "frontend.generate",
            context,
            arrived_ns,
            wall_ns(),
            {
                "request_id": request.order.request_id,
                "outcome": end.outcome,
                "prompt_tokens": request.order.prompt_tokens,
                "output_tokens": len(request.progress.ids),
                "cached_tokens": request.progress.cached_tokens or 0,
                "recomputed_tokens": request.progress.recomputed_tokens,
                "attempts": len(request.attempts),
                "takeovers": request.takeovers,
            },
            parent_span_id=caller_span_id,
            error=end.outcome if isinstance(end.error, MeshError) else "",
        )


def _path(caller: Caller, call: Call[Any, Any]) -> Path:
    """Return the flows in which `call` takes its turn: its tenant, if it has one, and its connection."""
    return (caller.tenant.name, call.peer) if caller.tenant.name else (call.peer,)
