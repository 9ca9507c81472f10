"""A neighbour that replays given arrivals against the mesh's own API, whatever becomes of them, and tells of each request.

Open loop: a slow mesh does not slow the arrivals. Run as `python -m bench.arrivals`, steered over stdin: replay {arrivals:
[[at_s, tenant, prompt tokens, output tokens, deadline_s], ...], keys: {tenant: bearer}} answers, in the order of arrival,
[tenant, milliseconds to the first token or null, reason of the error or "", retry after (s) or null, tokens, ended (s)].
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import grpc
import uvloop

from bench import control, prompts
from kvmesh.errors import from_rpc_error
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc


class Arrival(NamedTuple):
    """One request, `at_s` seconds after the start."""

    at_s: float
    tenant: str
    prompt_tokens: int
    output_tokens: int
    deadline_s: float


class Seen(NamedTuple):
    """What became of one."""

    tenant: str
    ttft_ms: float | None
    reason: str
    """Of the error; empty: it ended well."""
    retry_after_s: float | None
    tokens: int
    ended_s: float
    """After the start."""


async def ask(
    stub: inference_pb2_grpc.InferenceServiceAsyncStub,
    arrival: Arrival,
    bearer: str,
    draw: random.Random,
    start_s: float,
) -> Seen:
    """Send one request and read its answer to the end."""
    request = pb.GenerateRequest(
        tokens=pb.TokenPrompt(ids=prompts.random_ids(arrival.prompt_tokens, draw)),
        sampling=pb.Sampling(temperature=0.0),
        limits=pb.Limits(max_output_tokens=arrival.output_tokens),
    )
    metadata = (("authorization", f"Bearer {bearer}"),) if bearer else ()
    started_s, ttft_ms, tokens = time.monotonic(), None, 0
    reason, retry_after_s = "", None
    call = stub.Generate(request, timeout=arrival.deadline_s, metadata=metadata)
    try:
        async for message in call:
            if message.HasField("tokens"):
                if ttft_ms is None:
                    ttft_ms = (time.monotonic() - started_s) * 1000
                tokens += len(message.tokens.ids)
    except grpc.aio.AioRpcError as error:
        details = from_rpc_error(error)
        reason, retry_after_s = details.reason or error.code().name, details.retry_after_s
    return Seen(arrival.tenant, ttft_ms, reason, retry_after_s, tokens, time.monotonic() - start_s)


async def replay(
    stub: inference_pb2_grpc.InferenceServiceAsyncStub,
    arrivals: Sequence[Arrival],
    keys: Mapping[str, str],
    draw: random.Random,
) -> list[Seen]:
    """Send every request at its time; return when all have ended."""
    start_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for arrival in arrivals:
            await asyncio.sleep(max(0.0, start_s + arrival.at_s - time.monotonic()))
            tasks.append(group.create_task(ask(stub, arrival, keys.get(arrival.tenant, ""), draw, start_s)))
    return [task.result() for task in tasks]


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until stdin ends."""
    draw = random.Random(arguments.seed)
    async with grpc.aio.insecure_channel(arguments.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def run(command: Mapping[str, Any]) -> Mapping[str, Any]:
            arrivals = [Arrival(*one) for one in command["arrivals"]]
            return {"seen": await replay(stub, arrivals, command["keys"], draw)}

        await control.serve_commands({"replay": run}, {"ready": True})


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="bench.arrivals", description=__doc__)
    parser.add_argument("--target", required=True, help="host:port of the frontend")
    parser.add_argument("--seed", type=int, default=1)
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
