"""Behaviour of a whole mesh: slow readers, failover to a second frontend, traces through all services."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc
from tests.chaos.plan import Stream
from tests.chaos.truth import Truth
from tests.integration.generation import generate, generate_all, token_request
from tests.integration.harness import configure, running_mesh, until
from tests.integration.scraped import sample, settled
from tests.raw_http2 import RawConnection

pytestmark = pytest.mark.mesh

LONG = 12_000
"""Far more tokens than fit into windows and buffers between an engine and a client."""

UNREAD = 3_000
"""Number of tokens that take the engine more than the 2 s for which a window may be closed."""


async def test_a_slow_reader_delays_no_other_and_costs_four_bytes_a_token(tmp_path: Path) -> None:
    """A client that stops reading delays its own stream only; later it gets every token.

    Another client reads nothing and leaves in the end: it is charged for the tokens that the engine computed.
    """
    config = configure(
        engine={
            "arithmetic": "hashed",
            "kv_blocks": 2048,
            "max_sequence_tokens": LONG + 1000,
            "step_s": 0.001,
        },
        frontend={"max_output_tokens_max": LONG},
        prefill={"replicas": 1},
        decode={"replicas": 1, "slow_reader_s": 60.0},
    )
    async with running_mesh(config, tmp_path) as mesh:
        # A fixed window: otherwise gRPC would grow it until the whole output is in the client's memory.
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
        address = mesh.parts["frontend-0"].address
        async with (
            grpc.aio.insecure_channel(address, options=options) as channel,
            RawConnection.connect(address, stream_window=0) as raw,
        ):
            unread = raw.call("/kvmesh.inference.v1.InferenceService/Generate")
            await unread.send_message(token_request([8] * 40, max_output_tokens=UNREAD).SerializeToString())
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Generate(token_request([7] * 40, max_output_tokens=LONG, logprobs=True), timeout=110)
            ids = await read_some(call, 1)

            async def blocked() -> bool:
                status = await mesh.status("decode-0")
                return bool(status.log_bytes >= 8 * LONG + 4 * UNREAD)

            # The engine makes all tokens and frees its blocks, read or not; the log keeps the tokens.
            await until(blocked, 60, "decode has made every token")

            async def engine_is_done() -> bool:
                status = await mesh.status("decode-0")
                return bool(status.engine_call_count == 0 and status.load_report.block_reserved_count == 0)

            await until(engine_is_done, 5, "the engine is free while the reader sleeps")
            unread.reset()

            async def settled_all() -> bool:
                return (await settled(mesh))["output"] == UNREAD

            await until(settled_all, 10, "the client that left is charged the computed tokens")
            # With log-probabilities a token costs 8 bytes, without 4.
            assert (await mesh.status("decode-0")).log_bytes <= 8 * LONG
            others = [token_request([n] * 40, max_output_tokens=50) for n in range(20, 36)]
            answers = await generate_all(mesh.client(), others, concurrency=16, timeout_s=20)
            assert [answer.error for answer in answers] == [None] * 16
            while (more := await read_some(call, 1000)) != []:
                ids += more
            truth = Truth(config.engine.salt, config.engine.max_sequence_tokens)
            assert ids == await asyncio.to_thread(truth.tokens, alone([7] * 40, LONG))
        await mesh.idle(5)

        async def settled_rest() -> bool:
            return (await settled(mesh))["output"] == UNREAD + LONG + 16 * 50

        await until(settled_rest, 10, "all is settled")


async def test_a_reader_that_never_comes_back_is_ended_with_a_type(tmp_path: Path) -> None:
    """A closed flow-control window for the slow-reader time: RESOURCE_EXHAUSTED with reason SLOW_READER, and nothing is
    left.
    """
    config = configure(
        engine={"arithmetic": "hashed", "kv_blocks": 2048, "max_sequence_tokens": LONG + 1000},
        frontend={"max_output_tokens_max": LONG},
        prefill={"replicas": 1},
        decode={"replicas": 1, "slow_reader_s": 1.0},
    )
    async with running_mesh(config, tmp_path) as mesh:
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
        async with grpc.aio.insecure_channel(mesh.parts["frontend-0"].address, options=options) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Generate(token_request([7] * 40, max_output_tokens=LONG, logprobs=True), timeout=110)
            await read_some(call, 1)
            await mesh.idle(30)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await read_some(call, 1000):
                    pass
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert b"SLOW_READER" in _details(caught.value)
        made = await sample(mesh, "decode-0", "kvmesh_decode_sent_tokens_total")

        async def paid() -> bool:
            return bool(
                made <= (await settled(mesh))["output"] <= made + 1
            )  # the first token may be that of prefill

        await until(paid, 10, f"it pays for the {made:g} tokens that were computed")


async def test_a_client_continues_at_another_frontend(tmp_path: Path) -> None:
    """kill -9 of the client's frontend: UNAVAILABLE at once; with the resume token another frontend continues exactly."""
    config = configure(
        engine={"arithmetic": "hashed", "step_s": 0.01},
        frontend={"replicas": 2},
        prefill={"replicas": 1},
        decode={"replicas": 1},
    )
    async with running_mesh(config, tmp_path) as mesh:
        request = token_request([5] * 100, max_output_tokens=200, temperature=1.0, seed=9)
        whole = await generate(mesh.client("frontend-1"), request)
        assert whole.error is None
        killed: list[asyncio.Task[int]] = []

        def kill_once(answer: Any) -> None:
            if len(answer.ids) >= 50 and not killed:
                killed.append(asyncio.create_task(mesh.parts["frontend-0"].end()))

        broken = await generate(mesh.client("frontend-0"), request, on_tokens=kill_once)
        await killed[0]
        assert broken.code == grpc.StatusCode.UNAVAILABLE
        assert broken.started is not None
        again = pb.GenerateRequest()
        again.CopyFrom(request)
        again.options.resume.resume_token = broken.started.resume_token
        again.options.resume.received_token_ids.extend(broken.ids)
        ids = list(broken.ids)
        async for message in mesh.client("frontend-1").Generate(again, timeout=60):
            if message.WhichOneof("event") == "tokens":
                assert message.tokens.position == len(ids)
                ids += message.tokens.ids
        assert ids == whole.ids
        await mesh.idle(5)


class Collector(otlp_grpc.TraceServiceServicer):
    """An OTLP collector that keeps spans: (service, name, trace id, span id, parent)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, str, str, str]] = []

    async def Export(
        self, request: otlp.ExportTraceServiceRequest, context: Any
    ) -> otlp.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            names = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                    self.spans.append((names.get("service.name", ""), span.name, *ids))
        return otlp.ExportTraceServiceResponse()


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    """Run a collector and yield it with its endpoint."""
    collector, server = Collector(), grpc.aio.server()
    otlp_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]  # generated
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_one_trace_spans_all_services(tmp_path: Path) -> None:
    """A traced request leaves spans of frontend, router, prefill and decode under the client's trace id."""
    rng = random.Random(3)
    trace_id = f"{rng.getrandbits(128):032x}"
    async with collecting() as (collector, endpoint):
        config = configure(
            engine={"arithmetic": "hashed"},
            prefill={"replicas": 1},
            decode={"replicas": 1},
            telemetry={"otlp_endpoint": endpoint, "sample_ratio": 0.0},
        )
        async with running_mesh(config, tmp_path) as mesh:
            metadata = (("traceparent", f"00-{trace_id}-{'1' * 16}-01"),)
            request = token_request([5] * 200, max_output_tokens=5)
            async for _ in mesh.client().Generate(request, metadata=metadata, timeout=30):
                pass
            assert (await generate(mesh.client(), request)).error is None  # not traced

            def services() -> set[str]:
                return {service for service, _, trace, _, _ in collector.spans if trace == trace_id}

            def all_there() -> bool:
                return all(
                    any(role in name for name in services())
                    for role in ("frontend", "router", "prefill", "decode")
                )

            await until(all_there, 20, f"spans of every service: {collector.spans}")
            assert {trace for _, _, trace, _, _ in collector.spans} == {trace_id}
            known = {span for _, _, _, span, _ in collector.spans} | {"1" * 16}
            assert all(parent in known for _, _, _, _, parent in collector.spans), collector.spans


def alone(prompt: list[int], max_output_tokens: int) -> Stream:
    """Return the greedy output of `prompt`, as the oracle."""
    return Stream(0, "", 0.0, tuple(prompt), max_output_tokens, 1, 0.0, 0, is_plain=False, frontend=0)


def _details(error: grpc.aio.AioRpcError) -> bytes:
    """Return the serialized google.rpc status of `error`."""
    metadata: Any = error.trailing_metadata()
    return bytes(dict(metadata)["grpc-status-details-bin"])


async def read_some(call: Any, tokens: int) -> list[int]:
    """Read messages until `tokens` tokens or the end; return the tokens."""
    ids: list[int] = []
    while len(ids) < tokens:
        message = await call.read()
        if not message:
            break
        ids += message.tokens.ids
    return ids
