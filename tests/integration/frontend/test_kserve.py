"""KServe v2 by the stock clients of Triton: answers, errors and streams of many requests."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as sync_client
from tritonclient.grpc import InferInput, aio, service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from kvmesh.config_sections import TRANSPORTS
from services.frontend.surface.kserve import stream as kserve_stream
from tests.integration.frontend.conftest import Serving, serving_frontend, until
from tests.integration.frontend.scripted_router import Pool, oracle, serving_router
from tests.patience import patience, wait_for

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it
PROMPT = [70, 71, 72, 73] * 20


@pytest.fixture(params=TRANSPORTS)
async def edge(request: pytest.FixtureRequest, pool: Pool) -> AsyncIterator[Serving]:
    """A frontend with one router, on either transport."""
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving_router(pool, "router-0"))
        made = await stack.enter_async_context(serving_frontend(edge=request.param))
        made.route([("router-0", address)])
        await made.until_up(1)
        yield made


def tensor(name: str, datatype: str, values: Any, *shape: int) -> InferInput:
    kinds = {
        "INT32": np.int32,
        "BYTES": np.object_,
        "BOOL": np.bool_,
        "FP32": np.float32,
        "UINT64": np.uint64,
    }
    data = np.array(values, dtype=kinds[datatype]).reshape(shape or (1, 1))
    made = InferInput(name, list(data.shape), datatype)
    made.set_data_from_numpy(data)
    return made


def text(count: int = 8, stream: bool = True) -> list[InferInput]:
    return [
        tensor("text_input", "BYTES", [b"hello mesh"]),
        tensor("max_tokens", "INT32", [count]),
        tensor("stream", "BOOL", [stream]),
    ]


def tokens(count: int = 8, streaming: bool = True) -> list[InferInput]:
    return [
        tensor("input_ids", "INT32", PROMPT, 1, len(PROMPT)),
        tensor("input_lengths", "INT32", [len(PROMPT)]),
        tensor("request_output_len", "INT32", [count]),
        tensor("streaming", "BOOL", [streaming]),
    ]


def answer(result: Any) -> list[int]:
    return [int(each) for each in result.as_numpy("output_ids").reshape(-1)]


def final(response: Any) -> bool:
    (found,) = (value for key, value in response.parameters.items() if key == "triton_final_response")
    return bool(found.bool_param)


def raw(id_: str, inputs: list[InferInput], model: str = "tensorrt_llm", **parameters: Any) -> Any:
    """Return a request as the stock client encodes it, with `parameters` that the client would refuse."""
    made = service_pb2.ModelInferRequest(model_name=model, id=id_)
    for each in inputs:
        made.inputs.append(each._get_tensor())  # the client has no other way
        made.raw_input_contents.append(each._get_content())
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(made.parameters[name], kind, value)
    return made


class Stream:
    """A stream on raw stubs. Responses are kept by id."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Iterable[tuple[str, str]] = ()) -> None:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self.call = stub.ModelStreamInfer(metadata=tuple(metadata))
        self.by_id: dict[str, list[Any]] = {}

    async def send(self, *requests: Any) -> None:
        for each in requests:
            await self.call.write(each)

    async def read(self) -> Any:
        """Return the next response; None: the stream has ended well."""
        async with patience(20):
            message = await self.call.read()
        if message is EOF:
            assert await self.call.code() == grpc.StatusCode.OK
            return None
        self.by_id.setdefault(message.infer_response.id, []).append(message)
        return message

    async def until_final(self, *ids: str) -> None:
        """Read until each of `ids` has its last response."""
        left = set(ids)
        while left:
            message = await self.read()
            assert message is not None
            if final(message.infer_response):
                left.discard(message.infer_response.id)

    def ids(self, id_: str) -> list[int]:
        found = b"".join(
            each.infer_response.raw_output_contents[0]
            for each in self.by_id[id_]
            if each.infer_response.outputs
        )
        return [int(each) for each in np.frombuffer(found, dtype=np.int32)]


async def test_a_call_returns_the_whole_answer(edge: Serving) -> None:
    """In one response, which is the final one; a request with a stream needs the other method."""
    async with aio.InferenceServerClient(edge.address) as client:
        found = await client.infer("tensorrt_llm", tokens(streaming=False), request_id="r-1")
        assert answer(found) == oracle(PROMPT, 8)
        assert found.as_numpy("sequence_length").tolist() == [[8]]
        assert found.get_response().id == "r-1"
        assert final(found.get_response())
        said = (await client.infer("ensemble", text(stream=False))).as_numpy("text_output")
        assert said.shape == (1,)
        assert said[0].decode()
        with pytest.raises(InferenceServerException, match="decoupled") as caught:
            await client.infer("ensemble", text())
        assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
    await edge.until_empty()


async def test_the_sync_client_streams_deltas(edge: Serving) -> None:
    """With a callback, as the examples of Triton have it. Each response says whether it is the final one."""

    def stream() -> list[Any]:
        answers: queue.Queue[Any] = queue.Queue()
        seen: list[Any] = []
        with sync_client.InferenceServerClient(edge.address) as client:
            client.start_stream(lambda result, error: answers.put(error or result))
            client.async_stream_infer("tensorrt_llm", tokens(), request_id="a")
            while not seen or not final(seen[-1].get_response()):
                seen.append(answers.get(timeout=20))
                assert not isinstance(seen[-1], Exception), seen[-1]
            client.async_stream_infer(
                "tensorrt_llm", tokens(), request_id="b", enable_empty_final_response=True
            )
            while seen[-1].get_response().id == "a" or not final(seen[-1].get_response()):
                seen.append(answers.get(timeout=20))
        return seen

    seen = await asyncio.to_thread(stream)
    for id_, is_empty in (("a", False), ("b", True)):
        mine = [each for each in seen if each.get_response().id == id_]
        assert (not mine[-1].get_response().outputs) is is_empty
        assert [final(each.get_response()) for each in mine] == [False] * (len(mine) - 1) + [True]
        deltas = [each for each in mine if each.get_response().outputs]
        assert [each for delta in deltas for each in answer(delta)] == oracle(PROMPT, 8)
        assert sum(int(each.as_numpy("sequence_length")[0, 0]) for each in deltas) == 8
    await edge.until_empty()


async def test_the_aio_client_ends_its_stream_after_the_last_response(edge: Serving) -> None:
    """It half-closes behind its last request; the stream ends well when both requests have."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for id_ in ("a", "b"):
            yield {"model_name": "ensemble", "inputs": text(), "request_id": id_}

    seen: dict[str, str] = {}
    async with aio.InferenceServerClient(edge.address) as client:
        async for result, error in client.stream_infer(requests()):
            assert error is None
            id_ = result.get_response().id
            seen[id_] = seen.get(id_, "") + result.as_numpy("text_output")[0].decode()
        whole = await client.infer("ensemble", text(stream=False))
    assert seen["a"] == seen["b"] == whole.as_numpy("text_output")[0].decode()
    await edge.until_empty()


async def test_a_thousand_requests_share_a_stream(edge: Serving, pool: Pool) -> None:
    """All at the same time: none has ended when the last one runs."""
    pool.tokens_max = 2
    stream = Stream(edge.channel)
    names = [f"r-{number}" for number in range(1000)]
    await stream.send(*(raw(name, tokens(3)) for name in names))
    await until(lambda: len(pool.submits) == 1000, "all run", 20)
    pool.tokens_max = 3
    await stream.until_final(*names)
    wanted = oracle(PROMPT, 3)
    assert all(stream.ids(name) == wanted for name in names)
    await stream.call.done_writing()
    assert await stream.read() is None
    await edge.until_empty()


async def test_a_full_stream_refuses_a_request_and_stays_open(
    edge: Serving, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the time of a retry; one that ended makes room."""
    monkeypatch.setattr(kserve_stream, "REQUESTS_MAX", 2)
    pool.tokens_max = 2
    stream = Stream(edge.channel)
    await stream.send(*(raw(id_, tokens(3)) for id_ in ("a", "b", "c")))
    await stream.until_final("c")
    (refused,) = stream.by_id["c"]
    assert refused.error_message.startswith(
        "LIVE_REQUESTS_FULL: 2 requests of this stream are live; 2 are allowed"
    )
    assert refused.infer_response.parameters["retry_after_ms"].uint64_param == 1000
    pool.tokens_max = 3
    await stream.until_final("a", "b")
    await stream.send(raw("d", tokens(3)))
    await stream.until_final("d")
    assert stream.ids("d") == oracle(PROMPT, 3)
    stream.call.cancel()


async def test_a_stuck_request_holds_no_other_up(edge: Serving, pool: Pool) -> None:
    """Nor does a request that is refused: its error has its id, and the stream goes on."""
    stream = Stream(edge.channel)
    pool.tokens_max = 2
    await stream.send(raw("stuck", tokens(8)))
    await until(lambda: len(pool.submits) == 1, "the first request runs")
    await stream.send(
        raw("wrong", tokens(0)), raw("unknown", tokens(2), model="bert"), raw("good", tokens(2))
    )
    await stream.until_final("wrong", "unknown", "good")
    assert stream.ids("good") == oracle(PROMPT, 2)
    (wrong,), (unknown,) = stream.by_id["wrong"], stream.by_id["unknown"]
    assert wrong.error_message.startswith("FIELD_OUT_OF_RANGE: request_output_len is 0; 1 to ")
    assert wrong.infer_response.parameters["kvmesh_reason"].string_param == "FIELD_OUT_OF_RANGE"
    assert unknown.error_message.startswith("MODEL_UNKNOWN: model_name is 'bert'")
    assert stream.ids("stuck") == oracle(PROMPT, 2)
    stream.call.cancel()
    await edge.until_empty()
    await until(lambda: len(pool.cancels) == 1, "the stuck request is cancelled")


async def test_an_error_ends_the_stream_if_the_client_asks_for_it(edge: Serving) -> None:
    """By metadata `triton_grpc_error`: the error is a status, and the other requests end."""
    stream = Stream(edge.channel, [("triton_grpc_error", "true")])
    await stream.send(raw("long", tokens(400)), raw("wrong", tokens(0)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await stream.read()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "FIELD_OUT_OF_RANGE: request_output_len is 0" in str(caught.value.details())
    await edge.until_empty()


async def test_a_request_stops_the_others_of_its_id(edge: Serving, pool: Pool) -> None:
    """By the input `stop` of TensorRT-LLM. An id may be used by several requests at the same time."""
    stream = Stream(edge.channel)
    pool.tokens_max = 2
    await stream.send(raw("a", tokens(8)), raw("a", tokens(8)), raw("b", tokens(8)))
    await until(lambda: len(pool.submits) == 3, "all run")
    stop = [tensor("stop", "BOOL", [True]), *tokens(8)]
    await stream.send(raw("a", stop, triton_enable_empty_final_response=True))
    await until(lambda: len(pool.cancels) == 2, "both are cancelled")
    pool.tokens_max = 8
    await stream.until_final("b")
    await stream.call.done_writing()
    while await stream.read() is not None:
        pass
    ends = [each.infer_response for each in stream.by_id["a"] if final(each.infer_response)]
    reasons = [each.parameters["kvmesh_finish_reason"].string_param for each in ends if each.outputs]
    assert (reasons, len(ends)) == (["cancelled"] * 2, 3)
    assert stream.ids("b") == oracle(PROMPT, 8)
    await edge.until_empty()


async def test_the_deadline_of_a_request_is_its_own(edge: Serving, pool: Pool) -> None:
    """A parameter of the request, in microseconds; the stream goes on. The deadline of a stream ends it."""
    pool.hold_at = "queued"
    stream = Stream(edge.channel)
    await stream.send(raw("late", tokens(8), timeout=200_000))
    await stream.until_final("late")
    (late,) = stream.by_id["late"]
    assert late.error_message.startswith("DEADLINE: ")
    stream.call.cancel()
    stub = service_pb2_grpc.GRPCInferenceServiceStub(edge.channel)
    call = stub.ModelStreamInfer(timeout=0.3)
    await call.write(raw("late", tokens(8)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await wait_for(call.read(), 20) is not EOF:
            pass
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await edge.until_empty()


async def test_a_drain_ends_streams_behind_their_last_request(edge: Serving, pool: Pool) -> None:
    """An idle one at once, another one when its request has ended; a new request is refused meanwhile."""
    idle, busy = Stream(edge.channel), Stream(edge.channel)
    pool.tokens_max = 2
    await busy.send(raw("a", tokens(8)))
    await idle.send(raw("b", tokens(1)))
    await idle.until_final("b")
    edge.frontend.begin_drain()
    with pytest.raises(grpc.aio.AioRpcError, match="DRAINING") as caught:
        await idle.read()
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    await busy.send(raw("c", tokens(1)))
    await busy.until_final("c")
    assert busy.by_id["c"][0].error_message.startswith("DRAINING: ")
    assert busy.by_id["c"][0].infer_response.parameters["retry_after_ms"].uint64_param >= 100
    pool.tokens_max = 8
    await busy.until_final("a")
    with pytest.raises(grpc.aio.AioRpcError, match="DRAINING"):
        await busy.read()
    assert busy.ids("a") == oracle(PROMPT, 8)


async def test_what_the_server_says_of_itself(edge: Serving) -> None:
    """Metadata and configuration agree; statistics count; what is not served is said by name."""
    await edge.frontend.server.set_serving(True)
    async with aio.InferenceServerClient(edge.address) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("ensemble")
        assert not await client.is_model_ready("ensemble", "2")
        assert not await client.is_model_ready("bert")
        assert (await client.get_server_metadata()).name == "kvmesh"
        index = await client.get_model_repository_index()
        assert [each.name for each in index.models][:2] == ["ensemble", "tensorrt_llm"]
        assert {each.state for each in index.models} == {"READY"}
        for name in ("ensemble", "tensorrt_llm"):
            said, config = await client.get_model_metadata(name), (await client.get_model_config(name)).config
            assert [each.name for each in said.inputs] == [each.name for each in config.input]
            assert [list(each.shape) for each in said.inputs] == [[-1, *each.dims] for each in config.input]
            assert [list(each.shape) for each in said.outputs] == [[-1, *each.dims] for each in config.output]
            assert config.model_transaction_policy.decoupled
            assert config.max_batch_size == 1
        await client.infer("ensemble", text(stream=False))
        (counts,) = (await client.get_inference_statistics("ensemble")).model_stats
        assert (counts.inference_count, counts.inference_stats.success.count) == (1, 1)
        with pytest.raises(InferenceServerException, match="MODEL_UNKNOWN: model_name is 'bert'") as caught:
            await client.get_model_metadata("bert")
        assert caught.value.status() == "StatusCode.NOT_FOUND"
        with pytest.raises(
            InferenceServerException, match="RepositoryModelLoad: kvmesh does not offer"
        ) as caught:
            await client.load_model("ensemble")
        assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
