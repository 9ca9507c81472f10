"""The client's side of the frontend: Generate over a Call. Translates, submits to the core, streams.

A shell: no decision is taken here but how long a call may live.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc

from kvmesh.call import Call, GrpcCall
from kvmesh.clock import Clock, wall_ns
from kvmesh.deadlines import from_remaining_s
from kvmesh.errors import MeshError
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.telemetry import TraceContext, Tracing, format_traceparent
from services.frontend import faults, messages, validation, wire
from services.frontend.adoption import Place
from services.frontend.core import FrontendCore
from services.frontend.detokenizer import Detokenizer
from services.frontend.draining import HAND_OVER_METADATA
from services.frontend.executions import Claim, Execution, Executions
from services.frontend.order import Order
from services.frontend.output import Output
from services.frontend.request import LiveRequest
from services.frontend.resume_token import ATTEMPT_STRIDE, EPOCH_MAX, Seal
from services.frontend.settlement import Report, Settlements
from services.frontend.tokenizer import ModelTokenizer
from services.frontend.validation import Asked, Bounds

log = logging.getLogger(__name__)

SERVICE_NAME: Final = "kvmesh.inference.v1.InferenceService"

THREAD_BYTES_MIN: Final = 8192
"""A message of this size takes some milliseconds to check, a prompt of this size to tokenize: a thread does it, so that
no other stream waits."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What the service promises its clients."""

    frontend: str
    """Name of this process."""
    region: str
    message_bytes_max: int
    default_deadline_s: float
    runtime_max_s: float


class InferenceService:
    """Serves kvmesh.inference.v1. `random_bits(n)` returns n random bits: request ids
    and seeds, which clients see and must not guess of each other. `seal` signs resume tokens.

    `is_seeded()` tells whether all engines of the mesh make the same tokens wherever they run. `on_refused` counts what
    never became a live request.
    """

    def __init__(
        self,
        core: FrontendCore,
        tokenizer: ModelTokenizer,
        bounds: Bounds,
        terms: Terms,
        clock: Clock,
        tracing: Tracing,
        seal: Seal,
        executions: Executions,
        settlements: Settlements,
        random_bits: Callable[[int], int] = secrets.randbits,
        is_seeded: Callable[[], bool] = lambda: True,
        on_refused: Callable[[MeshError], None] = lambda _: None,
    ) -> None:
        self._core = core
        self._tokenizer = tokenizer
        self._bounds = bounds
        self._terms = terms
        self._clock = clock
        self._tracing = tracing
        self._seal = seal
        self._executions = executions
        self._settlements = settlements
        self._big = asyncio.Lock()
        """Held while a thread checks a big message: several at once would leave the loop little of the interpreter."""
        self._random_bits = random_bits
        self._is_seeded = is_seeded
        self._on_refused = on_refused

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to `server`. Requests arrive as bytes: a bad one must get a better answer than gRPC's."""
        handler = grpc.unary_stream_rpc_method_handler(
            self.Generate,
            request_deserializer=None,
            response_serializer=pb.GenerateResponse.SerializeToString,
        )
        generic = grpc.method_handlers_generic_handler(SERVICE_NAME, {"Generate": handler})
        server.add_generic_rpc_handlers((generic,))

    async def Generate(
        self, data: bytes, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:  # named by the protocol
        """See inference.proto."""
        await self.serve(data, GrpcCall(context))

    async def serve(self, data: bytes, call: Call[bytes, pb.GenerateResponse]) -> None:
        """Serve one call. Raises MeshError with the call's status."""
        arrived_s, arrived_ns = self._clock.now_s(), wall_ns()
        caller = self._tracing.begin(call.metadata.get("traceparent"))
        context = self._tracing.child(caller)
        ready, owner = asyncio.Event(), self._executions.new_owner()
        try:
            order = await self._read(data, arrived_s, call, context, owner)
            output = Output(
                Detokenizer(self._tokenizer.token_bytes), order.stop, with_logprobs=order.logprobs
            )
            request = self._core.submit(order, output, ready.set, self._clock.now_s())
        except MeshError as error:
            self._executions.forget(owner)
            self._on_refused(error)
            raise
        del data
        try:
            await self._stream(call, request, ready)
        finally:
            now_s = self._clock.now_s()
            self._core.leave(request, now_s, was_deadline=now_s >= order.deadline_s)
            self._executions.forget(owner)
            self._settle(request)
            self._record(request, context, caller.span_id, arrived_ns)

    async def _stream(
        self, call: Call[bytes, pb.GenerateResponse], request: LiveRequest, ready: asyncio.Event
    ) -> None:
        """Write what is there as one message, then what piled up meanwhile, until the end. Raises MeshError."""
        output, place = request.output, None
        try:
            await call.write(messages.started(request.order, self._seal))
            while True:
                tokens = output.take()
                if tokens is not None:
                    position = output.taken
                    place = self._tell_place(tokens, request, place)
                    await call.write(pb.GenerateResponse(tokens=tokens))
                    self._core.deliver(request, position, self._clock.now_s())
                elif request.end is None:
                    ready.clear()
                    await ready.wait()
                elif request.end.error is not None:
                    raise request.end.error
                else:
                    break
            terms = self._terms
            await call.write(
                messages.finished(request, terms.frontend, terms.region, is_seeded=self._is_seeded())
            )
        except (grpc.aio.UsageError, grpc.aio.InternalError) as error:
            # The call ended under the write: the client is gone, and nobody reads a status.
            log.debug("write failed", extra={"request_id": request.order.request_id, "why": str(error)})

    def _tell_place(self, tokens: pb.Tokens, request: LiveRequest, told: Place | None) -> Place | None:
        """Put the resume token into `tokens` if the request runs elsewhere than the client knows; return the place."""
        place = request.place
        if place is None or place == told:
            return told
        tokens.resume_token = messages.newer_token(request.order, place, self._seal)
        return place

    def _settle(self, request: LiveRequest) -> None:
        """Report what the client of a request that is over was given, also of one that goes on elsewhere."""
        end, order, progress = request.end, request.order, request.progress
        assert end is not None
        is_complete = end.error is None
        output_tokens = len(progress.ids) if is_complete else progress.delivered
        if not (is_complete or output_tokens):
            return
        self._settlements.add(
            Report(
                order.request_id,
                order.epoch,
                order.owner,
                order.prompt_tokens,
                output_tokens,
                progress.recomputed_tokens,
                is_complete,
            )
        )

    async def _read(
        self,
        data: bytes,
        arrived_s: float,
        call: Call[bytes, pb.GenerateResponse],
        context: TraceContext,
        owner: str,
    ) -> Order:
        """Return what the client asks for, complete. Raises MeshError before any router hears of it."""
        with self._core.place_to_read(self._clock.now_s()):
            if len(data) < THREAD_BYTES_MIN:
                asked = self._check(data)
            else:
                async with self._big:
                    asked = await asyncio.to_thread(self._check, data)
            prompt_ids = array("i", await self._tokenize(asked)).tobytes()
            return await self._order(asked, prompt_ids, arrived_s, call, context, owner)

    def _check(self, data: bytes) -> Asked:
        message = wire.parse(data, self._terms.message_bytes_max, self._bounds.max_sequence_tokens)
        return validation.check(message, self._bounds, self._seal)

    async def _tokenize(self, asked: Asked) -> list[int] | tuple[int, ...]:
        if asked.token_ids is not None:
            return asked.token_ids
        if asked.prompt_bytes < THREAD_BYTES_MIN:
            return self._encode(asked)
        return await asyncio.to_thread(self._encode, asked)

    def _encode(self, asked: Asked) -> list[int]:
        if asked.text is not None:
            return self._tokenizer.encode(asked.text)
        return self._tokenizer.encode_chat(asked.chat or ())

    async def _order(
        self,
        asked: Asked,
        prompt_ids: bytes,
        arrived_s: float,
        call: Call[bytes, pb.GenerateResponse],
        context: TraceContext,
        owner: str,
    ) -> Order:
        """Return the complete order. Raises MeshError."""
        max_output_tokens = validation.fit(asked, len(prompt_ids) // 4, self._bounds)
        digest = validation.digest(asked, prompt_ids, max_output_tokens)
        validation.check_resumed(asked, digest)
        resume = asked.resume
        deadline_s, is_clients = self._deadline(arrived_s, call.remaining_s())
        if deadline_s <= self._clock.now_s():
            raise faults.deadline("DEADLINE", max(0.0, deadline_s - arrived_s), 0)
        timeout_s = asked.ttft_timeout_s
        request_id = self._request_id(asked)
        execution = await self._begin(asked, request_id, digest, owner)
        return Order(
            request_id=request_id,
            prompt_ids=prompt_ids,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            seed=execution.seed,
            stop=asked.stop,
            max_output_tokens=max_output_tokens,
            model_version=self._bounds.model_version,
            end_token_id=self._tokenizer.end_token_id,
            priority=asked.priority,
            session_id=asked.session_id,
            arrived_s=arrived_s,
            deadline_s=deadline_s,
            is_clients_deadline=is_clients,
            ttft_deadline_s=arrived_s + timeout_s if timeout_s is not None else None,
            attempt_base=execution.epoch * ATTEMPT_STRIDE,
            is_resumed=resume is not None,
            is_fenced=execution.is_fenced,
            is_keyed=bool(asked.idempotency_key),
            owner=owner,
            can_move=HAND_OVER_METADATA in call.metadata,
            place=resume.place if resume is not None else None,
            received_ids=asked.received_ids,
            logprobs=asked.logprobs,
            explain=asked.explain,
            traceparent=format_traceparent(context),
            digest=digest,
        )

    def _request_id(self, asked: Asked) -> str:
        """Return the identity of the request: the one it had, one that its key gives at every frontend, or a new one."""
        if asked.resume is not None:
            return asked.resume.request_id
        if asked.idempotency_key:
            return self._seal.name(asked.idempotency_key)
        return f"{self._random_bits(128):032x}"

    async def _begin(self, asked: Asked, request_id: str, digest: int, owner: str) -> Execution:
        """Return the execution that starts now. Only what may have run before asks for its number. Raises MeshError."""
        resume = asked.resume
        seed = resume.seed if resume is not None else asked.seed
        is_seed_asked = seed is not None
        if seed is None:
            seed = self._random_bits(64)
        if resume is None and not asked.idempotency_key:
            return Execution(0, seed, is_fenced=True)
        least = resume.epoch + 1 if resume is not None else 0
        for other in self._core.live.executions(request_id):
            least = max(least, min(EPOCH_MAX, other.order.epoch + 1))
        return await self._executions.begin(Claim(request_id, digest, seed, is_seed_asked, least, owner))

    def _deadline(self, arrived_s: float, remaining_s: float | None) -> tuple[float, bool]:
        """Return when the request must end, and whether that is the client's own deadline."""
        if remaining_s is None:
            return arrived_s + self._terms.default_deadline_s, False
        if remaining_s <= self._terms.runtime_max_s:
            return from_remaining_s(remaining_s, arrived_s), True
        return arrived_s + self._terms.runtime_max_s, False

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
                "adoptions": request.adoptions,
            },
            parent_span_id=caller_span_id,
            error=end.outcome if isinstance(end.error, MeshError) else "",
        )
