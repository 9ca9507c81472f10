"""Calls to one Triton server, on the stubs and tensors of `tritonclient`.

Each stream carries one request. So the end of the stream is the end of the request, an error belongs to that request, and
a cancel ends no other request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Protocol
from weakref import WeakSet

import grpc
from tritonclient.grpc import InferInput, service_pb2, service_pb2_grpc

from kvmesh.triton import capabilities, errors
from kvmesh.triton.capabilities import ModelFacts
from kvmesh.triton.errors import CallError, EngineLost
from kvmesh.triton.fact_sources import NO_METRICS, NOTHING, ConfiguredFacts, MetricsFound
from kvmesh.triton.linked_stream import LinkedStream

MODEL: Final = "tensorrt_llm"
UNARY_TIMEOUT_S: Final = 5.0
PROBE_PERIOD_S: Final = 0.1
_MESSAGE_BYTES_MAX: Final = 64 << 20
_CHANNEL_OPTIONS: Final = [
    ("grpc.max_send_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name this is the deadline of one attempt to connect. It bounds the cost of a lost SYN.
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]


class Responses(Protocol):
    """Responses of one stream. They end when the server is done, or soon after `cancel`.

    Call `cancel` before they are dropped. To end the stream early once `is_sent`, cancel the stream and not the task
    that reads it. After a cancelled task, grpc.aio leaks the responses that come until the call is over, up to 9 KB
    each time (`python -m bench.cancelled`). grpcio 1.85 reads batches only for a waiting task. Before `is_sent`, cancel
    the task.
    """

    is_sent: bool

    def __aiter__(self) -> Responses: ...

    async def __anext__(self) -> Any:
        """Return the next ModelInferResponse. Raises CallError."""
        ...

    def cancel(self) -> None: ...


class TritonClient:
    """Calls of a service to the Triton server at `address`. The creator must `close` it."""

    def __init__(self, address: str, model: str = MODEL, *, has_linked_streams: bool = False) -> None:
        """`has_linked_streams`: subscriptions and exchanges run on the batched transport."""
        self.address = address
        self.model = model
        self.has_linked_streams = has_linked_streams
        self._open()

    async def close(self) -> None:
        """Close the channel. Its streams break."""
        await _close(self._channel, self._writing, self._linked)

    def reconnect(self) -> Coroutine[Any, Any, None]:
        """Use a new channel from now on. The returned coroutine closes the old channel, and its streams break.

        This is for a server that was silent. TCP may wait many seconds on the old connection before a retransmission.
        """
        closing = _close(self._channel, self._writing, self._linked)
        self._open()
        return closing

    async def is_ready(self, timeout_s: float = UNARY_TIMEOUT_S) -> bool:
        """Return True if the model is ready. An unreachable server is False, not an error."""
        try:
            request = service_pb2.ModelReadyRequest(name=self.model)
            return bool((await self._stub.ModelReady(request, timeout=timeout_s)).ready)
        except grpc.aio.AioRpcError:
            return False
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            return False  # the channel was replaced

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when the model is ready. Raises EngineLost after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.is_ready():
                    await asyncio.sleep(PROBE_PERIOD_S)
        except TimeoutError:
            raise EngineLost(
                f"No engine answers at {self.address}: the model {self.model} was not ready within {timeout_s:g} s."
            ) from None

    async def facts(
        self,
        *,
        role: str,
        model_version: str,
        block_tokens: int,
        configured: ConfiguredFacts = NOTHING,
        metrics: MetricsFound = NO_METRICS,
    ) -> ModelFacts:
        """Return the facts of the model. Raises ModelRefused, or CallError if the server does not answer."""
        metadata, config = await self.describe()
        return capabilities.derive(
            metadata,
            config,
            role=role,
            model_version=model_version,
            block_tokens=block_tokens,
            configured=configured,
            metrics=metrics,
        )

    async def describe(self) -> tuple[Any, Any]:
        """Return Triton's ModelMetadataResponse and ModelConfig. Raises CallError if the server does not answer."""
        try:
            metadata = await self._stub.ModelMetadata(
                service_pb2.ModelMetadataRequest(name=self.model), timeout=UNARY_TIMEOUT_S
            )
            config = await self._stub.ModelConfig(
                service_pb2.ModelConfigRequest(name=self.model), timeout=UNARY_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise errors.of_status(error.code(), error.details() or "") from error
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise EngineLost("the channel was replaced") from None
        return metadata, config.config

    def stream(
        self,
        inputs: list[InferInput],
        *,
        request_id: str = "",
        parameters: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Responses:
        """Open a stream for one request. The first read sends the request and half-closes. Must run on the event loop.

        `timeout_s` bounds the whole stream. The caller must cancel the responses in every case.
        """
        request = _request(self.model, inputs, request_id, parameters)
        return _Responses(self._stub.ModelStreamInfer(timeout=timeout_s), request, self._writing)

    def subscription(
        self, inputs: list[InferInput], *, request_id: str, parameters: dict[str, str] | None
    ) -> Responses:
        """Open a stream for one request with many responses. As `stream`."""
        request = _request(self.model, inputs, request_id, parameters)
        return _Responses(self._long_call(), request, self._writing)

    def request(self, inputs: list[InferInput], request_id: str, parameters: dict[str, str]) -> Any:
        """Return a request for an exchange."""
        return _request(self.model, inputs, request_id, parameters)

    def exchange(self) -> Exchange:
        """Open a stream for many requests. Must run on the event loop. The caller must cancel it in every case."""
        return Exchange(self._long_call())

    async def request_once(
        self,
        inputs: list[InferInput],
        *,
        request_id: str = "",
        parameters: dict[str, str] | None = None,
        timeout_s: float = UNARY_TIMEOUT_S,
    ) -> None:
        """Send one request, and read and drop its answers. Raises CallError."""
        async with opened(
            self.stream(inputs, request_id=request_id, parameters=parameters, timeout_s=timeout_s)
        ) as responses:
            async for _ in responses:
                pass

    def _long_call(self) -> Any:
        """Return a call of ModelStreamInfer for many messages."""
        if not self.has_linked_streams:
            return self._stub.ModelStreamInfer()
        stream = LinkedStream(self.address, _MESSAGE_BYTES_MAX)
        self._linked.add(stream)
        return stream

    def _open(self) -> None:
        self._channel = grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._writing: set[asyncio.Timeout] = set()
        """Writes of requests to this channel, under way."""
        self._linked: WeakSet[LinkedStream] = WeakSet()


async def _close(
    channel: grpc.aio.Channel, writing: set[asyncio.Timeout], linked: WeakSet[LinkedStream]
) -> None:
    """Close `channel` and the `linked` streams, and let each stream that is `writing` go on to its read. There the end is
    an error.

    grpc.aio waits for ever to write to a call that was cancelled before it was connected.
    """
    for stream in list(linked):
        stream.drop()
    await channel.close(None)
    while writing:
        writing.pop().reschedule(0.0)


def _request(
    model: str, inputs: list[InferInput], request_id: str, parameters: dict[str, str] | None
) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for tensor in inputs:
        # tritonclient has no public function from its tensors to a request of its protocol.
        request.inputs.append(tensor._get_tensor())  # noqa: SLF001
        request.raw_input_contents.append(tensor._get_content())  # noqa: SLF001
    for key, value in (parameters or {}).items():
        request.parameters[key].string_param = value
    return request


@asynccontextmanager
async def opened(responses: Responses) -> AsyncIterator[Responses]:
    """Cancel `responses` at the end of the block in every case."""
    try:
        yield responses
    finally:
        responses.cancel()


class _Responses:
    """Writes the request with the first read, and raises typed errors for error texts and transport exceptions.

    `call` is a call of ModelStreamInfer. It is read message by message. The iterators of grpc and tritonclient would
    take 8 KB and a task per stream, and a few microseconds of CPU per answer (measured once, by hand).
    """

    __slots__ = ("_call", "_request", "_was_cancelled", "_writing", "is_sent")

    def __init__(
        self, call: Any, request: service_pb2.ModelInferRequest, writing: set[asyncio.Timeout]
    ) -> None:
        self.is_sent = False
        self._call = call
        self._was_cancelled = False
        self._writing = writing
        self._request: service_pb2.ModelInferRequest | None = request

    def __aiter__(self) -> Responses:
        return self

    async def __anext__(self) -> Any:
        try:
            if self._request is not None:
                request, self._request = self._request, None
                await self._write(request)
                self.is_sent = True
            response = await self._call.read()
        except grpc.aio.AioRpcError as broken:
            raise errors.of_status(broken.code(), broken.details() or "") from broken
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            if self._was_cancelled:
                raise StopAsyncIteration from None
            raise EngineLost("the channel was closed under the stream") from None
        if response is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs left it out
            raise StopAsyncIteration
        if response.error_message:
            raise errors.of_text(response.error_message)
        return response.infer_response

    def cancel(self) -> None:
        self._was_cancelled = True
        self._call.cancel()

    async def _write(self, request: service_pb2.ModelInferRequest) -> None:
        # A call that ended before the write raises its error at the read. Only there the status is complete.
        with suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(None) as writing:
                self._writing.add(writing)
                try:
                    await self._call.write(request)
                    await self._call.done_writing()
                finally:
                    self._writing.discard(writing)


class Exchange:
    """A stream of many requests. One task writes, another one reads.

    To end it early, `cancel` it and not the task that reads, as with Responses.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Any) -> None:
        self._call = call

    async def write(self, request: Any) -> None:
        """Write one request. The error of a broken stream is raised by `read`."""
        with suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
            await self._call.write(request)

    async def read(self) -> Any:
        """Return the next ModelStreamInferResponse, or None after the last one. Raises CallError."""
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as broken:
            raise errors.of_status(broken.code(), broken.details() or "") from broken
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise EngineLost("the channel was closed under the stream") from None
        return None if response is grpc.aio.EOF else response  # type: ignore[attr-defined]  # as above

    def cancel(self) -> None:
        """End the stream."""
        self._call.cancel()


def _is_cancelled() -> bool:
    """True if this task was cancelled, not only the call that it reads."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


__all__ = ["CallError", "Exchange", "Responses", "TritonClient", "opened"]
