"""A neighbour that asks the mesh and Triton in turn: the same kind of request, time to first token of each.

One request at a time; every prompt is new, so no cache helps either side. Run as `python -m bench.ttft`, steered over
stdin: ask {pairs, prompt} answers lists of milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

import grpc
import numpy as np
import uvloop
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient

from bench import control, prompts
from bench.engines import MODEL
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc

OUTPUT_TOKENS = 4
TIMEOUT_S = 30.0


class Seen(NamedTuple):
    """One first token through the mesh. Milliseconds."""

    client: float
    """From call to first token, at the client."""
    frontend: float
    """From arrival to first token, at the frontend."""
    prefill: float
    """From the hand-over to the engine to the first token, at the replica that ran the prompt."""


async def ask_mesh(stub: inference_pb2_grpc.InferenceServiceAsyncStub, prompt: list[int]) -> Seen:
    """Return when the first token was seen where; reads the answer to its end."""
    request = pb.GenerateRequest(
        tokens=pb.TokenPrompt(ids=prompt),
        sampling=pb.Sampling(temperature=0.0),
        limits=pb.Limits(max_output_tokens=OUTPUT_TOKENS),
        options=pb.GenerateOptions(explain=True),
    )
    started_s, first_s = time.monotonic(), 0.0
    told = pb.Explanation()
    call = stub.Generate(request, timeout=TIMEOUT_S)
    try:
        async for message in call:
            if not first_s and message.HasField("tokens"):
                first_s = time.monotonic()
            elif message.HasField("finished"):
                told = message.finished.explanation
    finally:
        call.cancel()
    prefill_ms = told.attempts[0].prefill.ToMicroseconds() / 1000
    return Seen((first_s - started_s) * 1000, told.time_to_first_token.ToMicroseconds() / 1000, prefill_ms)


async def ask_triton(client: InferenceServerClient, prompt: list[int]) -> float:
    """The same, to one Triton server that runs prompt and output."""
    inputs = [
        _tensor("input_ids", "INT32", np.array([prompt], dtype=np.int32)),
        _tensor("input_lengths", "INT32", np.array([[len(prompt)]], dtype=np.int32)),
        _tensor("request_output_len", "INT32", np.array([[OUTPUT_TOKENS]], dtype=np.int32)),
        _tensor("streaming", "BOOL", np.array([[True]])),
        _tensor("temperature", "FP32", np.array([[0.0]], dtype=np.float32)),
        _tensor("end_id", "INT32", np.array([[-1]], dtype=np.int32)),
    ]

    async def one() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": MODEL, "inputs": inputs}

    started_s, first_s = time.monotonic(), 0.0
    responses = client.stream_infer(one(), stream_timeout=TIMEOUT_S)
    async for _, error in responses:
        if error is not None:
            raise RuntimeError(error.message())
        if not first_s:
            first_s = time.monotonic()
    return (first_s - started_s) * 1000


def _tensor(name: str, datatype: str, values: np.ndarray[Any, Any]) -> InferInput:
    tensor = InferInput(name, list(values.shape), datatype)
    tensor.set_data_from_numpy(values)
    return tensor


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until stdin ends."""
    draw = random.Random(arguments.seed)
    async with (
        grpc.aio.insecure_channel(arguments.target) as channel,
        InferenceServerClient(arguments.triton) as client,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def ask(command: Mapping[str, Any]) -> Mapping[str, Any]:
            mesh, triton_ms = [], []
            for _ in range(command["pairs"]):
                mesh.append(await ask_mesh(stub, prompts.random_ids(command["prompt"], draw)))
                await asyncio.sleep(draw.uniform(0.005, 0.02))  # not in step with anybody's timer
                triton_ms.append(await ask_triton(client, prompts.random_ids(command["prompt"], draw)))
                await asyncio.sleep(draw.uniform(0.005, 0.02))
            client_ms, frontend_ms, prefill_ms = zip(*mesh, strict=True)
            return {
                "client_ms": client_ms,
                "frontend_ms": frontend_ms,
                "prefill_ms": prefill_ms,
                "triton_ms": triton_ms,
            }

        await control.serve_commands({"ask": ask}, {"ready": True})


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="bench.ttft", description=__doc__)
    parser.add_argument("--target", required=True, help="host:port of the frontend")
    parser.add_argument("--triton", required=True, help="host:port of the Triton server to compare with")
    parser.add_argument("--seed", type=int, default=1)
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
