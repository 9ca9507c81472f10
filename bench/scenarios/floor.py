"""The floor: the cost of the Attach library and of grpc.aio alone.

A source and a sink with nothing between are the floor of every forwarding service. A stub of the client API is the
floor of the frontend. The stub is this module as a process: it streams one message per token and client.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import grpc

from bench import accounting, aims, control
from bench.generate_only import GenerateOnly
from bench.pacing import token_id_at
from bench.processes import ANY_CORE, TEST_CORE, Fleet, Process
from bench.results import ScenarioResults
from bench.windows import PROMPT_TOKENS, QUICK_CASES, Case, Pace, SystemUnderTest
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc

LATENCY_CASE = "one request at a time"
LATENCY_PER_S = 30
LATENCY_S = 2.0
PER_S = 200


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    with Fleet() as fleet:
        source = fleet.start_ready("source", "bench.source", role="router", id="source-0")
        sink = fleet.start_ready("sink", "bench.sink", TEST_CORE, target=source.address)
        reader = SystemUnderTest(results, pace, sink, sink)
        for case in QUICK_CASES:
            _run_frames(reader, case, source)
        window = reader.requests(PER_S, source)
        spent_ms = window.cpu_s * 1e3 / window.counts["finished"]
        reader.add(aims.RATE_200, "CPU per request of the writer", "ms", spent_ms)
    with Fleet() as fleet:
        source = fleet.start_ready("source", "bench.source", ANY_CORE, role="decode", id="source-0")
        sink = fleet.start_ready("sink", "bench.sink", ANY_CORE, target=source.address, phase="local")
        results.add(LATENCY_CASE, aims.ATTACH_TRIP, "ms", _latency_ms(sink))
        edge = fleet.start_ready("edge-anywhere", __name__, ANY_CORE)
        client = fleet.start_ready("client-anywhere", "bench.client", ANY_CORE, target=edge.address)
        edge.ask("pace", step_ms=1000)
        results.add(LATENCY_CASE, aims.EDGE_TRIP, "ms", _latency_ms(client))
    with Fleet() as fleet:
        edge = fleet.start_ready("edge", __name__, TEST_CORE)
        client = fleet.start_ready("client", "bench.client", target=edge.address)
        server = SystemUnderTest(results, pace, edge, client)
        for case in QUICK_CASES:
            _run_edge(server, case)
        edge.ask("pace", step_ms=20)
        window = server.requests(PER_S)
        spent_ms = window.cpu_s * 1e3 / (window.counts["started"] or 1)
        server.add(aims.RATE_200, "CPU per request of a server of the client API", "ms", spent_ms)


def _latency_ms(load: Process) -> float:
    """Return the median time to first token of single requests with one output token."""
    load.ask("rate", per_s=LATENCY_PER_S, prompt=PROMPT_TOKENS, tokens=1)
    time.sleep(LATENCY_S)
    load.ask("close")
    return float(statistics.median(load.ask("counters")["ttft_ms"]))


def _run_frames(reader: SystemUnderTest, case: Case, source: Process) -> None:
    source.ask("pace", step_ms=case.step_ms)
    reader.open(case)
    before_ns = accounting.cpu_ns(source.pid)
    window = reader.measure()
    written_ns = accounting.cpu_ns(source.pid) - before_ns
    reader.add_streams(case, window)
    if window.counts["frames"]:
        reader.add(case, aims.FRAME_WRITER, "us", written_ns / 1e3 / window.counts["frames"])
    reader.end(case)


def _run_edge(server: SystemUnderTest, case: Case) -> None:
    server.process.ask("pace", step_ms=case.step_ms)
    server.open(case)
    window = server.measure()
    if window.counts["tokens"]:
        server.add(case, aims.EDGE_WRITER, "us", window.cpu_s * 1e6 / window.counts["tokens"])
    server.end(case)


class FrontendStub(GenerateOnly):
    """Sends every live call one token per step."""

    def __init__(self) -> None:
        self.step_s = 0.02
        self._steps: set[asyncio.Event] = set()

    async def Generate(  # type: ignore[override]  # named by the protocol; writes instead of yielding
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Stream tokens until the limit."""
        step = asyncio.Event()
        self._steps.add(step)
        try:
            for position in range(request.limits.max_output_tokens):
                if position:
                    await step.wait()
                    step.clear()
                tokens = pb.Tokens(text=" word", ids=(token_id_at(position),), position=position)
                await context.write(pb.GenerateResponse(tokens=tokens))
        finally:
            self._steps.discard(step)

    async def run(self) -> None:
        """Step at multiples of the step time, until cancelled."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s = max(next_s + self.step_s, loop.time())
            await asyncio.sleep(next_s - loop.time())
            for step in self._steps:
                step.set()


async def serve() -> None:
    """Serve until stdin ends."""
    edge = FrontendStub()
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(edge, server)

    async def pace(step_ms: float) -> None:
        edge.step_s = step_ms / 1000

    async with asyncio.TaskGroup() as tasks, control.serving(server) as address:
        stepping = tasks.create_task(edge.run(), name="edge-steps")
        await control.serve_commands(pace, address=address)
        stepping.cancel()


if __name__ == "__main__":
    control.main(serve, __doc__)
