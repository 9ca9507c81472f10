"""The whole path: client, frontend, router, prefill, decode, and two engines in real Triton servers. Nothing is pinned."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bench import accounting, aims
from bench.engines import EngineCosts
from bench.mesh import Mesh
from bench.processes import ANY_CORE, BenchError, Fleet, Process
from bench.quantiles import quantile
from bench.results import ScenarioResults
from bench.windows import PROMPT_TOKENS, Case, Pace, SystemUnderTest, growth

OUTPUT_TOKENS = 4000
COSTS = {
    "prefill-0": EngineCosts(0.0, prefill_token_s=20e-6),
    "decode-0": EngineCosts(0.020, prefill_token_s=20e-6),
}
CASES = (Case(1, 20), Case(16, 20), Case(64, 20))
PAIRS, QUICK_PAIRS = 100, 30
TTFT_CASE = "one request at a time"


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat. A prefill replica runs the prompts, which are long enough: the handoff is on the path."""
    with Fleet() as fleet:
        running = Mesh(fleet, COSTS, {})
        frontend, (prefill, decode) = running.frontend, running.replicas.values()
        decode_engine = running.engines["decode-0"].process
        client = fleet.neighbour("client", "bench.client", ANY_CORE, target=frontend.address)
        frontend.wait_until(lambda: _is_served(client), "answered no request", every_s=0.5)
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
        meters["stub of decode"] = lambda: sum(
            map(accounting.cpu_ns, accounting.descendants(decode_engine.pid))
        )
        triton = running.engines["prefill-0"].address
        probe = fleet.neighbour("ttft", "bench.ttft", ANY_CORE, target=frontend.address, triton=triton)
        _run_ttft(results, probe, QUICK_PAIRS if pace.is_quick else PAIRS)
        fleet.stop(probe)
        whole = SystemUnderTest(results, pace, frontend, client, stream_tokens=OUTPUT_TOKENS)
        for case in CASES[:2] if pace.is_quick else CASES:
            _run_case(whole, case, decode, meters)


def _is_served(client: Process) -> bool:
    """Return whether a request is answered: the processes may not have found each other yet."""
    try:
        client.ask("open", streams=1, prompt=PROMPT_TOKENS, tokens=2)
    except BenchError:
        client.ask("forgive")
        return False
    return True


def _run_ttft(results: ScenarioResults, probe: Process, pairs: int) -> None:
    probe.ask("ask", pairs=5, prompt=PROMPT_TOKENS)
    answer = probe.ask("ask", pairs=pairs, prompt=PROMPT_TOKENS)
    mesh, triton = answer["client_ms"], answer["triton_ms"]
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        through, direct = quantile(mesh, share), quantile(triton, share)
        results.add(TTFT_CASE, f"time to first token through the mesh, {name}", "ms", through)
        results.add(TTFT_CASE, f"time to first token from Triton, {name}", "ms", direct)
        results.add(TTFT_CASE, f"added time to first token, {name}", "ms", through - direct)
    parts = {
        aims.EDGE_PART: [a - b for a, b in zip(mesh, answer["frontend_ms"], strict=True)],
        aims.MESH_PART: [a - b for a, b in zip(answer["frontend_ms"], answer["prefill_ms"], strict=True)],
    }
    for name, values in parts.items():
        results.add(TTFT_CASE, name, "ms", quantile(values, 0.5))
    call_ms = quantile(answer["prefill_ms"], 0.5) - quantile(triton, 0.5)
    results.add(TTFT_CASE, aims.CALL_PART, "ms", call_ms)


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
