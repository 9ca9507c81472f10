"""A neighbour that asks the mesh and Triton in turn: the same kind of request, time to first token of each.

One request at a time; every prompt is new, so no cache helps either side. Run as `python -m bench.ttft`, steered over
stdin: ask {pairs, prompt} answers lists of milliseconds.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient

from bench import control, generation
from kvmesh.cli.readiness import TRITON_MODEL

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


async def ask_mesh(stub: generation.Stub, prompt: list[int]) -> Seen:
    """Return when the first token was seen where; reads the answer to its end."""
    answer = await generation.ask(stub, generation.request(prompt, OUTPUT_TOKENS, explain=True), TIMEOUT_S)
    if answer.finished is None or answer.ttft_s is None:
        raise RuntimeError(f"no whole answer: {answer.error or 'no token'}")
    told = answer.finished.explanation
    prefill_ms = told.attempts[0].prefill.ToMicroseconds() / 1000
    return Seen(answer.ttft_s * 1000, told.time_to_first_token.ToMicroseconds() / 1000, prefill_ms)


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
        yield {"model_name": TRITON_MODEL, "inputs": inputs}

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


async def serve(target: str, triton: str, seed: int = 1) -> None:
    """Serve until stdin ends. `target`: host:port of the frontend, `triton`: of the server to compare with."""
    draw = random.Random(seed)
    async with generation.channel(target) as stub, InferenceServerClient(triton) as client:

        async def ask(pairs: int, prompt: int) -> Mapping[str, Any]:
            mesh, triton_ms = [], []
            for _ in range(pairs):
                mesh.append(await ask_mesh(stub, generation.random_ids(prompt, draw)))
                await asyncio.sleep(draw.uniform(0.005, 0.02))  # not in step with anybody's timer
                triton_ms.append(await ask_triton(client, generation.random_ids(prompt, draw)))
                await asyncio.sleep(draw.uniform(0.005, 0.02))
            client_ms, frontend_ms, prefill_ms = zip(*mesh, strict=True)
            return {
                "client_ms": client_ms,
                "frontend_ms": frontend_ms,
                "prefill_ms": prefill_ms,
                "triton_ms": triton_ms,
            }

        await control.serve_commands(ask)


if __name__ == "__main__":
    control.main(serve, __doc__)
