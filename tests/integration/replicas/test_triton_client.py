"""The client's streams against a scripted Triton server: requests, responses, and ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from kvmesh.attach import frames
from kvmesh.triton.client import TritonClient, opened
from kvmesh.triton.errors import CallError, EngineLost, EngineStalled, HandoffLost, InvalidRequest
from kvmesh.triton.port import CallKind, EngineCall
from kvmesh.triton.tensors import RequestTensors, parameters_of
from tests.integration.harness import until
from tests.patience import patience

CALL = EngineCall(
    CallKind.GENERATION_ONLY, "r-1", frames.pack_ids([5, 6]), 4, context_phase_params=b"h", kv_peer="a:1"
)
both = pytest.mark.parametrize("linked", [False, True], ids=["grpcio", "linked"])
INPUTS = frozenset({"input_ids", "input_lengths", "request_output_len", "streaming"})


class Triton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # made without types
    """Keeps the requests of a stream, waits for its half-close, responds as the test says."""

    def __init__(self, answer: Callable[[Any], AsyncIterator[Any]]) -> None:
        self.answer = answer
        self.requests: list[Any] = []
        self.half_closed = 0
        self.cancelled = 0

    async def ModelStreamInfer(  # named by the protocol
        self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        """See Triton's protocol."""
        try:
            async for request in requests:
                self.requests.append(request)
            self.half_closed += 1
            async for response in self.answer(context):
                yield response
        except (asyncio.CancelledError, GeneratorExit):
            # The latter if the cancel meets a response on its way.
            self.cancelled += 1
            raise


@asynccontextmanager
async def serving(triton: Triton, *, has_linked_streams: bool = False) -> AsyncIterator[TritonClient]:
    """Yield a client of `triton`."""
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = TritonClient(f"127.0.0.1:{port}", has_linked_streams=has_linked_streams)
    try:
        yield client
    finally:
        await client.close()
        await server.stop(0)


def stream(client: TritonClient, timeout_s: float = 10.0) -> Any:
    """Open a stream for CALL, as a subscription where those are linked."""
    inputs = RequestTensors(INPUTS).of_call(CALL)
    if client.has_linked_streams:
        return client.subscription(inputs, request_id=CALL.request_id, parameters=parameters_of(CALL))
    return client.stream(
        inputs, request_id=CALL.request_id, parameters=parameters_of(CALL), timeout_s=timeout_s
    )


async def two(context: Any) -> AsyncIterator[Any]:
    """Send two responses."""
    for number in range(2):
        yield service_pb2.ModelStreamInferResponse(
            infer_response=service_pb2.ModelInferResponse(id="r-1", model_version=str(number))
        )


@both
async def test_a_stream_carries_one_request_and_is_half_closed(linked: bool) -> None:
    """Id, parameters, tensors and their bytes arrive unchanged; every response comes back, then the end."""
    triton = Triton(two)
    async with (
        serving(triton, has_linked_streams=linked) as client,
        opened(stream(client)) as responses,
    ):
        versions = [response.model_version async for response in responses]
        assert versions == ["0", "1"]
        (request,) = triton.requests
        assert (request.model_name, request.id) == (client.model, "r-1") and triton.half_closed == 1
        assert {key: value.string_param for key, value in request.parameters.items()} == {
            "request_type": "generation_only",
            "kv_peer": "a:1",
        }
        contents = dict(zip([one.name for one in request.inputs], request.raw_input_contents, strict=True))
        assert contents["input_ids"] == CALL.token_ids and contents["context_phase_params"] == b"h"
        assert [list(one.shape) for one in request.inputs if one.name == "input_ids"] == [[1, 2]]


@both
async def test_an_error_message_without_a_code_is_typed_by_its_text(linked: bool) -> None:
    """The message ends the iteration with a typed error, for any messages after it."""

    async def refuse(context: Any) -> AsyncIterator[Any]:
        yield service_pb2.ModelStreamInferResponse(error_message="KV cache transfer failed: gone")
        await asyncio.Event().wait()

    triton = Triton(refuse)
    async with serving(triton, has_linked_streams=linked) as client:
        with pytest.raises(HandoffLost, match="gone"):
            async with opened(stream(client)) as responses:
                await anext(responses)
        await until(lambda: triton.cancelled == 1, 5.0, "the server hears of the cancel")


@pytest.mark.parametrize(
    ("code", "kind"),
    [(grpc.StatusCode.UNAVAILABLE, EngineLost), (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest)],
)
@both
async def test_a_status_is_typed_by_its_code(
    code: grpc.StatusCode, kind: type[CallError], linked: bool
) -> None:
    """Also after responses."""

    async def abort(context: Any) -> AsyncIterator[Any]:
        async for response in two(context):
            yield response
        await context.abort(code, "no")

    async with (
        serving(Triton(abort), has_linked_streams=linked) as client,
        opened(stream(client)) as responses,
    ):
        await anext(responses)
        await anext(responses)
        with pytest.raises(kind):
            await anext(responses)


async def test_a_call_that_ends_before_its_request_has_a_typed_error() -> None:
    """The deadline has passed, or no process listens: the same typed errors as later."""
    async with serving(Triton(two)) as client:
        responses = stream(client, timeout_s=0.0)
        await until(responses._call.done, 5.0, "the call is over")
        with pytest.raises(EngineStalled):
            await anext(responses)
    for linked in (False, True):
        gone = TritonClient("127.0.0.1:1", has_linked_streams=linked)
        with pytest.raises(EngineLost):
            async with opened(stream(gone)) as responses:
                await anext(responses)
        await gone.close()


class Breaking:
    """A call of gRPC's core with a transport that breaks during one of its operations."""

    def __init__(self, inner: Any, operation: str) -> None:
        self._inner = inner
        self._operation = operation

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name != self._operation:
            return found

        async def broken(*arguments: Any) -> None:
            await found(*arguments)
            raise grpc.aio.InternalError('Failed "execute_batch"')

        return broken


@pytest.mark.parametrize("operation", ["send_serialized_message", "send_receive_close"])
async def test_a_transport_that_breaks_during_a_request_loses_the_engine(operation: str) -> None:
    """During the request or during its half-close; grpc.aio has an error of its own for each."""

    async def abort(context: Any) -> AsyncIterator[Any]:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        yield

    async with serving(Triton(abort)) as client, opened(responses := stream(client)):
        responses._call._cython_call = Breaking(responses._call._cython_call, operation)
        with pytest.raises(EngineLost):
            await anext(responses)


@pytest.mark.parametrize("ends", ["reconnect", "reconnect later", "close"])
@both
async def test_a_channel_that_ends_before_it_is_connected_ends_its_streams(ends: str, linked: bool) -> None:
    """The peer takes the connection and says nothing. A stream may begin between a reconnect and the end of its channel."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(10.0)
        client = TritonClient(f"127.0.0.1:{silent.getsockname()[1]}", has_linked_streams=linked)
        async with opened(client.subscription([], request_id="load_report", parameters={})) as responses:
            reading = asyncio.ensure_future(anext(responses))
            if ends == "reconnect later":
                closing = client.reconnect()
            connection, _ = await asyncio.to_thread(silent.accept)
            await (closing if ends == "reconnect later" else getattr(client, ends)())
            with pytest.raises(EngineLost):
                async with patience(10.0):
                    await reading
        await client.close()
        connection.close()


@pytest.mark.parametrize("when", ["unread", "writing", "reading", "answered"])
@both
async def test_a_cancel_ends_the_call_once_and_leaks_nothing(when: str, linked: bool) -> None:
    """At any moment: the call ends, the server sees at most one cancellation, and no task is left."""

    async def hold(context: Any) -> AsyncIterator[Any]:
        if when == "answered":
            async for response in two(context):
                yield response
        await asyncio.Event().wait()

    triton = Triton(hold)
    async with serving(triton, has_linked_streams=linked) as client:
        before = asyncio.all_tasks()
        responses = stream(client)
        async with opened(responses):
            reading = asyncio.ensure_future(_read(responses, 1 if when == "answered" else 9))
            if when == "answered":
                await reading
            elif when == "reading":
                await until(lambda: triton.half_closed == 1, 5.0, "the request is there")
            elif when == "writing":
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading])
        responses.cancel()
        assert linked or responses._call.done()
        if when in ("reading", "answered"):
            await until(lambda: triton.cancelled == 1, 5.0, "the server hears of the cancel")
        await until(lambda: not _client_tasks(before), 5.0, "no task is left")


def _client_tasks(before: set[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
    new = asyncio.all_tasks() - before - {asyncio.current_task()}
    own = ("_prepare_rpc", "_read", "connect:", "call:")
    return [task for task in new if any(name in repr(task) for name in own)]


async def _read(responses: Any, count: int) -> None:
    for _ in range(count):
        await anext(responses)
