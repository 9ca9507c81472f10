"""The whole path: client, frontend, router, prefill, decode, and two engines in real Triton servers. No process is pinned.

The client that measures time to first token is this module as a process. It sends requests to the mesh and to Triton in
turn, one at a time (closed loop), each with a new prompt without cached blocks.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient

from bench import accounting, aims, control, generation
from bench.engines import EngineCosts
from bench.mesh import Mesh
from bench.processes import ANY_CORE, Fleet, Process
from bench.results import BenchError, ScenarioResults, quantile
from bench.windows import ANSWER_TOKENS, PROMPT_TOKENS, Case, Pace, SystemUnderTest, growth
from kvmesh.cli.readiness import TRITON_MODEL

OUTPUT_TOKENS = 4000
COSTS = {
    "prefill-0": EngineCosts(0.0, prefill_token_s=20e-6),
    "decode-0": EngineCosts(0.020, prefill_token_s=20e-6),
}
CASES = (Case(1, 20), Case(16, 20), Case(64, 20))
PAIRS, QUICK_PAIRS = 100, 30
TTFT_CASE = "one request at a time"
TIMEOUT_S = 30.0


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat. The prompts are so long that a prefill replica runs them: the handoff is on the path."""
    with Fleet() as fleet:
        cases = CASES[:2] if pace.is_quick else CASES
        pairs = QUICK_PAIRS if pace.is_quick else PAIRS
        measure(results, pace, fleet, Mesh(fleet, COSTS, {}), cases, pairs, OUTPUT_TOKENS)


def measure(
    results: ScenarioResults,
    pace: Pace,
    fleet: Fleet,
    running: Mesh,
    cases: Sequence[Case],
    pairs: int,
    stream_tokens: int,
) -> None:
    """Measure a running mesh of one prefill and one decode replica.

    `pairs`: requests to the mesh and to Triton in turn. `stream_tokens`: output of a stream, more than its window takes.
    """
    frontend, (prefill, decode) = running.frontend, running.replicas.values()
    decode_engine = running.engines["decode-0"].process
    client = fleet.start_ready("client", "bench.client", ANY_CORE, target=frontend.address)
    frontend.wait_until(lambda: is_served(client), "answered no request", every_s=0.5)
    pids = {
        "client": client.pid,
        "frontend": frontend.pid,
        "router": running.routers[0].pid,
        "prefill": prefill.pid,
        "decode": decode.pid,
        "Triton of decode": decode_engine.pid,
    }
    meters: dict[str, Callable[[], int]] = {
        name: partial(accounting.cpu_ns, pid) for name, pid in pids.items()
    }
    meters["stub of decode"] = lambda: sum(map(accounting.cpu_ns, accounting.descendants(decode_engine.pid)))
    triton = running.engines["prefill-0"].address
    probe = fleet.start_ready("ttft", __name__, ANY_CORE, target=frontend.address, triton=triton)
    run_ttft(results, probe, pairs)
    fleet.stop(probe)
    whole = SystemUnderTest(results, pace, frontend, client, stream_tokens=stream_tokens)
    for case in cases:
        _run_case(whole, case, decode, meters)


def is_served(client: Process) -> bool:
    """Return whether a request is answered. It fails until the processes have found each other."""
    try:
        client.ask("open", streams=1, prompt=PROMPT_TOKENS, tokens=2)
    except BenchError:
        client.ask("forgive")
        return False
    return True


def run_ttft(results: ScenarioResults, probe: Process, pairs: int, case: str = TTFT_CASE) -> None:
    """Add the time to first token of `pairs` requests through the mesh and to Triton, and its parts."""
    probe.ask("ask", pairs=5, prompt=PROMPT_TOKENS)
    answer = probe.ask("ask", pairs=pairs, prompt=PROMPT_TOKENS)
    mesh, triton = answer["client_ms"], answer["triton_ms"]
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        through, direct = quantile(mesh, share), quantile(triton, share)
        results.add(case, f"time to first token through the mesh, {name}", "ms", through)
        results.add(case, f"time to first token from Triton, {name}", "ms", direct)
        results.add(case, f"added time to first token, {name}", "ms", through - direct)
    parts = {
        aims.EDGE_PART: [a - b for a, b in zip(mesh, answer["frontend_ms"], strict=True)],
        aims.MESH_PART: [a - b for a, b in zip(answer["frontend_ms"], answer["prefill_ms"], strict=True)],
    }
    for name, values in parts.items():
        results.add(case, name, "ms", quantile(values, 0.5))
    call_ms = quantile(answer["prefill_ms"], 0.5) - quantile(triton, 0.5)
    results.add(case, aims.CALL_PART, "ms", call_ms)


def _run_case(
    whole: SystemUnderTest, case: Case, decode: Process, meters: dict[str, Callable[[], int]]
) -> None:
    def read() -> dict[str, float]:
        metrics = {
            name: decode.metric(f"kvmesh_decode_{name}_total")
            for name in ("sent_tokens", "step_batch_flushes")
        }
        return metrics | {name: meter() for name, meter in meters.items()}

    whole.open(case)
    before = read()
    window = whole.measure()
    spent = growth(before, read())
    tokens = window.counts["tokens"]
    if tokens:
        whole.add(case, "tokens per second", "tokens/s", tokens / window.seconds)
        whole.add(case, aims.ROWS, "rows", spent["sent_tokens"] / (spent["step_batch_flushes"] or 1))
        whole.add(case, "tokens per client message", "tokens", tokens / window.counts["frames"])
        for name in meters:
            whole.add(case, f"{aims.PER_TOKEN}, {name}", "us", spent[name] / 1e3 / tokens)
    else:
        whole.problem(case, "no token arrived in the window")
    whole.end(case)


class Seen(NamedTuple):
    """Time to first token of one request through the mesh, in milliseconds."""

    client: float
    """From call to first token, at the client."""
    frontend: float
    """From arrival to first token, at the frontend."""
    prefill: float
    """From the submit to the engine to the first token, at the replica that ran the prompt."""


async def ask_mesh(stub: generation.Stub, prompt: list[int]) -> Seen:
    """Return the time to first token at each process; the answer is read to its end."""
    asked = generation.request(prompt, ANSWER_TOKENS, explain=True, ignore_eos=True)
    answer = await generation.ask(stub, asked, TIMEOUT_S)
    if answer.finished is None or answer.ttft_s is None:
        raise RuntimeError(f"incomplete answer: {answer.error or 'no token'}")
    told = answer.finished.explanation
    prefill_ms = told.attempts[0].prefill.ToMicroseconds() / 1000
    return Seen(answer.ttft_s * 1000, told.time_to_first_token.ToMicroseconds() / 1000, prefill_ms)


async def ask_triton(client: InferenceServerClient, prompt: list[int]) -> float:
    """Return the time to first token of one Triton server that runs prompt and output, in milliseconds."""
    inputs = [
        _tensor("input_ids", "INT32", np.array([prompt], dtype=np.int32)),
        _tensor("input_lengths", "INT32", np.array([[len(prompt)]], dtype=np.int32)),
        _tensor("request_output_len", "INT32", np.array([[ANSWER_TOKENS]], dtype=np.int32)),
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
    """Serve until stdin ends. `target`: host:port of the frontend; `triton`: of a Triton server."""
    draw = random.Random(seed)
    async with generation.channel(target) as stub, InferenceServerClient(triton) as client:

        async def ask(pairs: int, prompt: int) -> Mapping[str, Any]:
            mesh, triton_ms = [], []
            for _ in range(pairs):
                mesh.append(await ask_mesh(stub, generation.random_ids(prompt, draw)))
                await asyncio.sleep(draw.uniform(0.005, 0.02))  # out of step with all timers
                triton_ms.append(await ask_triton(client, generation.random_ids(prompt, draw)))
                await asyncio.sleep(draw.uniform(0.005, 0.02))
            times_ms = dict(
                zip(("client_ms", "frontend_ms", "prefill_ms"), zip(*mesh, strict=True), strict=True)
            )
            return {**times_ms, "triton_ms": triton_ms}

        await control.serve_commands(ask)


if __name__ == "__main__":
    control.main(serve, __doc__)
