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
from tests.integration.frontend.conftest import Serving, serving_frontend, until
from tests.integration.frontend.scripted_router import Pool, oracle, serving_router
from tests.patience import patience, wait_for

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
    kinds = {"INT32": np.int32, "BYTES": np.object_, "BOOL": np.bool_, "FP32": np.float32, "UINT64": np.uint64}
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


async def test_text_and_tokens_come_by_a_call_and_by_a_stream(edge: Serving) -> None:
    """With the aio client."""
    async with aio.InferenceServerClient(edge.address) as client:
        whole = await client.infer("ensemble", text(stream=False))
        print(whole.get_response())
        ids = await client.infer("tensorrt_llm", tokens(streaming=False))
        print(ids.get_response())
