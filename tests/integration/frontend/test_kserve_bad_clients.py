"""Clients of KServe that stall: they lose their stream, and hold no other one up."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from kvmesh.config_sections import TRANSPORTS
from services.frontend.surface.kserve import stream as kserve_stream
from services.frontend.surface.kserve.stream import InferStream
from services.frontend.surface.kserve.stream_call import StreamCall
from tests.integration.frontend.conftest import Serving, serving_frontend, until
from tests.integration.frontend.scripted_router import Pool, oracle, serving_router
from tests.integration.frontend.test_kserve import PROMPT, Stream, edge, final, raw, tensor, tokens
from tests.raw_frames import framed
from tests.raw_http2 import RawConnection, RawStream

__all__ = ["edge"]  # the fixture

PATH = "/inference.GRPCInferenceService/ModelStreamInfer"


def parsed(stream: RawStream) -> list[Any]:
    return stream.decoded(service_pb2.ModelStreamInferResponse.FromString)


async def test_a_client_that_reads_no_errors_loses_its_stream(
    edge: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its refused requests wait for a bounded time. Streams of other clients go on meanwhile."""
    monkeypatch.setattr(kserve_stream, "ERROR_S", 0.3)
    async with RawConnection.connect(edge.address, stream_window=500) as connection:
        stuck = connection.call(PATH)
        for number in range(20):
            await stuck.send_message(raw(f"r-{number}", tokens(0)).SerializeToString(), end=False)
        good = Stream(edge.channel)
        await good.send(raw("good", tokens(8)))
        await good.until_final("good")
        assert good.ids("good") == oracle(PROMPT, 8)
        good.call.cancel()
        await until(lambda: not edge.frontend.kserve.stream_count, "no stream is left")
        stuck.grant(1 << 20)
        await stuck.ended()
        assert stuck.status != 0


async def test_an_idle_stream_ends(edge: Serving, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time without a request; a stream with one stays for as long as that one runs."""
    pool.tokens_max = 2
    busy = Stream(edge.channel)
    await busy.send(raw("a", tokens(4)))
    await until(lambda: len(pool.runs) == 1, "it runs")
    monkeypatch.setattr(kserve_stream, "IDLE_S", 0.2)
    idle = Stream(edge.channel)
    with pytest.raises(grpc.aio.AioRpcError, match="REQUEST_TIMEOUT: the stream had no request") as caught:
        await idle.read()
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    pool.tokens_max = 4
    await busy.until_final("a")
    assert busy.ids("a") == oracle(PROMPT, 4)
    with pytest.raises(grpc.aio.AioRpcError, match="REQUEST_TIMEOUT"):
        await busy.read()


async def test_half_a_message_ends_the_input_alone(pool: Pool) -> None:
    """The requests before it run to their end; then the stream has the status."""
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving_router(pool, "router-0"))
        serving = await stack.enter_async_context(serving_frontend(edge=TRANSPORTS[0], request_timeout_s=0.3))
        serving.route([("router-0", address)])
        await serving.until_up(1)
        pool.tokens_max = 2
        connection = await stack.enter_async_context(RawConnection.connect(serving.address))
        stream = connection.call(PATH)
        await stream.send_message(raw("a", tokens(4)).SerializeToString(), end=False)
        await stream.send_data(framed(raw("b", tokens(4)).SerializeToString())[:-1])
        reader = serving.frontend.service.calls
        await until(lambda: reader.late_total == 1, "the rest of the message is late")
        assert not stream.has_ended
        pool.tokens_max = 4
        await stream.ended()
        assert stream.status == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert stream.message.startswith("REQUEST_TIMEOUT: the message did not arrive within 0.3 s")
        assert {each.infer_response.id for each in parsed(stream)} == {"a"}
        last = parsed(stream)[-1].infer_response.parameters
        assert last["kvmesh_finish_reason"].string_param == "length"


async def test_a_message_that_is_none_has_an_error_without_id(edge: Serving) -> None:
    """The stream goes on."""
    async with RawConnection.connect(edge.address) as connection:
        stream = connection.call(PATH)
        await stream.send_message(b"\xff" * 40, end=False)
        await stream.send_message(raw("good", tokens(2)).SerializeToString())
        await stream.ended()
        assert stream.status == 0
        first = parsed(stream)[0]
        assert first.error_message.startswith("MESSAGE_MALFORMED: ")
        assert first.infer_response.id == ""
        assert parsed(stream)[-1].infer_response.parameters["triton_final_response"].bool_param


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """While it is not set, no stream takes a message of the mesh."""
    gate = asyncio.Event()
    gate.set()
    write, try_write = StreamCall.write, StreamCall.try_write

    async def wait(call: StreamCall, message: bytes) -> None:
        await gate.wait()
        await write(call, message)

    monkeypatch.setattr(StreamCall, "write", wait)
    monkeypatch.setattr(
        StreamCall, "try_write", lambda call, message: gate.is_set() and try_write(call, message)
    )
    return gate


@pytest.mark.parametrize("streams", [True, False])
async def test_a_request_has_one_last_response_whenever_it_is_stopped(
    serving: Serving, pool: Pool, gate: asyncio.Event, streams: bool
) -> None:
    """Its last response may be on its way, and `stop` may come twice. A client counts on exactly one."""
    stream = Stream(serving.channel)
    (target,) = await began(serving, stream)
    if streams:
        pool.tokens_max = 3
    gate.clear()
    await stream.send(raw("r", tokens(50 if streams else 4, streaming=streams)))
    await until(lambda: target._output._writing is not None, "a response is being written")
    for _ in range(2):
        await stream.send(raw("r", [*tokens(1), tensor("stop", "BOOL", [True])]))
    await stream.send(raw("behind", tokens(1)))
    await until(lambda: any(call.id == "behind" for call in target._live.values()), "the stops were read")
    gate.set()
    pool.tokens_max = 1 << 30
    await stream.until_final("r", "behind")
    await stream.call.done_writing()
    while await stream.read() is not None:
        pass
    assert sum(final(each.infer_response) for each in stream.by_id["r"]) == 1
    await serving.until_empty()


async def began(serving: Serving, stream: Stream) -> list[InferStream]:
    """Begin the stream with a request, and return the streams of the frontend."""
    await stream.send(raw("first", tokens(1)))
    await stream.until_final("first")
    return list(serving.frontend.kserve._streams)
