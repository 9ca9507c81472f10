"""The first request after a start: time to first token at a frontend that has just begun to serve, beside later ones.

The client is this module as a process. It asks with a text, so that the tokenizer is on the path. Its connection is made
before the first request, as a load balancer's is.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

import grpc

from bench import control, generation
from bench.engines import EngineCosts
from bench.mesh import Mesh
from bench.processes import ANY_CORE, Fleet
from bench.results import ScenarioResults, quantile
from bench.windows import Pace
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc

COSTS = {name: EngineCosts(0.001, prefill_token_s=1e-6) for name in ("prefill-0", "decode-0")}
STARTS, QUICK_STARTS = 10, 3
REQUESTS = 10
"""Requests after each start, one at a time."""
OUTPUT_TOKENS = 4
WORDS = 30
TIMEOUT_S = 30.0
FRONTEND_CASE = "a frontend starts"
BOTH_CASE = "a router and a frontend start"


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    starts = QUICK_STARTS if pace.is_quick else STARTS
    with Fleet() as fleet:
        mesh = Mesh(fleet, COSTS, {})
        client = fleet.start_ready("client", __name__, ANY_CORE)
        client.ask("ask", target=mesh.frontend.address, requests=REQUESTS)  # warms replicas and client up
        for case in (FRONTEND_CASE, BOTH_CASE):
            started_ms, first_ms, later_ms = [], [], []
            for _ in range(starts):
                fleet.stop(mesh.frontend)
                if case == BOTH_CASE:
                    mesh.restart_routers()
                began_s = time.monotonic()
                mesh.start_frontend()
                started_ms.append((time.monotonic() - began_s) * 1000)
                told = client.ask("ask", target=mesh.frontend.address, requests=REQUESTS)["ttft_ms"]
                first_ms.append(told[0])
                later_ms += told[1:]
            results.add(case, "time to first token of the first request, p50", "ms", quantile(first_ms, 0.5))
            results.add(case, "time to first token of later requests, p50", "ms", quantile(later_ms, 0.5))
            results.add(case, "start of the frontend until it serves, p50", "ms", quantile(started_ms, 0.5))


async def serve(seed: int = 1) -> None:
    """Serve until stdin ends."""
    draw = random.Random(seed)

    async def ask(target: str, requests: int) -> Mapping[str, Any]:
        async with grpc.aio.insecure_channel(target) as channel:
            await channel.channel_ready()
            stub: generation.Stub = inference_pb2_grpc.InferenceServiceStub(channel)
            return {"ttft_ms": [await _ttft_ms(stub, draw) for _ in range(requests)]}

    await control.serve_commands(ask)


async def _ttft_ms(stub: generation.Stub, draw: random.Random) -> float:
    """Return the time to first token of a new text, which no replica has in its cache."""
    text = " ".join(f"word{draw.randrange(1000)}" for _ in range(WORDS))
    request = pb.GenerateRequest(text=text, limits=pb.Limits(max_output_tokens=OUTPUT_TOKENS))
    answer = await generation.ask(stub, request, TIMEOUT_S)
    if answer.finished is None or answer.ttft_s is None:
        raise RuntimeError(f"incomplete answer: {answer.error or 'no token'}")
    return answer.ttft_s * 1000


if __name__ == "__main__":
    control.main(serve, __doc__)
