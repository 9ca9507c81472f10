"""The whole path: client, frontend, router, prefill, decode, and two engines in real Triton servers. Nothing is pinned."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import accounting, aims, engines
from bench.engines import EngineCosts
from bench.processes import ANY_CORE, BenchError, Fleet, Process
from bench.results import Results
from bench.windows import Case, Pace, check_faults

NAME = "path"
PROMPT_TOKENS = 256
"""Long enough that a prefill replica runs it: the handoff is on the path."""
OUTPUT_TOKENS = 4000
PREFILL_TOKEN_S = 20e-6
CASES = (Case(1, 20), Case(16, 20), Case(64, 20))
QUICK_CASES = (Case(1, 20), Case(16, 20))
PAIRS = 100
TTFT_CASE = "one request at a time"
SERVE_TIMEOUT_S = 20.0

CONFIG: dict[str, dict[str, Any]] = {
    "engine": {"arithmetic": "hashed", "max_sequence_tokens": 8192, "kv_blocks": 60_000},
    "telemetry": {"log_level": "warning"},
}


def run(results: Results, pace: Pace) -> None:
    """Measure one repeat."""
    with Fleet() as fleet:
        redis_url = fleet.redis()
        config = fleet.config(CONFIG)
        prefill_engine = engines.start(
            fleet, "prefill-engine", EngineCosts(0.0, prefill_token_s=PREFILL_TOKEN_S), ANY_CORE
        )
        decode_engine = engines.start(
            fleet, "decode-engine", EngineCosts(0.020, prefill_token_s=PREFILL_TOKEN_S), ANY_CORE
        )
        router = fleet.service("router", "router-0", config, redis_url, core=ANY_CORE)
        for engine in (prefill_engine, decode_engine):
            engines.wait_ready(engine)
        prefill = _replica(fleet, "prefill", config, redis_url, prefill_engine.address)
        decode = _replica(fleet, "decode", config, redis_url, decode_engine.address)
        frontend = fleet.service("frontend", "frontend-0", config, redis_url, core=ANY_CORE)
        client = fleet.neighbour("client", "bench.client", "--target", frontend.address, core=ANY_CORE)
        _wait_served(client)
        meters: dict[str, Callable[[], int]] = {
            "client": lambda: accounting.cpu_ns(client.pid),
            "frontend": lambda: accounting.cpu_ns(frontend.pid),
            "router": lambda: accounting.cpu_ns(router.pid),
            "prefill": lambda: accounting.cpu_ns(prefill.pid),
            "decode": lambda: accounting.cpu_ns(decode.pid),
            "Triton of decode": lambda: accounting.cpu_ns(decode_engine.process.pid),
            "stub of decode": lambda: sum(
                accounting.cpu_ns(pid) for pid in accounting.descendants(decode_engine.process.pid)
            ),
        }
        probe = fleet.neighbour(
            *("ttft", "bench.ttft", "--target", frontend.address, "--triton", prefill_engine.address),
            core=ANY_CORE,
        )
        _run_ttft(results, probe, 30 if pace.is_quick else PAIRS)
        fleet.stop(probe)
        for case in QUICK_CASES if pace.is_quick else CASES:
            _run_case(results, pace, case, client, decode, meters)


def _replica(fleet: Fleet, role: str, config: Path, redis_url: str, engine: str) -> Process:
    return fleet.service(role, f"{role}-0", config, redis_url, "--engine", engine, core=ANY_CORE)


def _wait_served(client: Process) -> None:
    """Return when a request was answered: everybody has found everybody."""
    end_s = time.monotonic() + SERVE_TIMEOUT_S
    while True:
        before = client.ask("counters")
        try:
            client.ask("open", streams=1, prompt=PROMPT_TOKENS, tokens=2)
        except BenchError:
            if time.monotonic() > end_s:
                raise
            client.ask("forgive")
            time.sleep(0.5)
            continue
        while client.ask("counters")["finished"] == before["finished"]:
            if time.monotonic() > end_s:
                raise BenchError("no request was answered by the whole path")
            time.sleep(0.05)
        return


def _run_ttft(results: Results, probe: Process, pairs: int) -> None:
    probe.ask("ask", pairs=5, prompt=PROMPT_TOKENS)
    answer = probe.ask("ask", pairs=pairs, prompt=PROMPT_TOKENS)
    mesh, triton = answer["client_ms"], answer["triton_ms"]
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        through, direct = _quantile(mesh, share), _quantile(triton, share)
        results.add(NAME, TTFT_CASE, f"time to first token through the mesh, {name}", "ms", through)
        results.add(NAME, TTFT_CASE, f"time to first token from Triton, {name}", "ms", direct)
        results.add(NAME, TTFT_CASE, f"added time to first token, {name}", "ms", through - direct)
    parts = {
        aims.EDGE_PART: [a - b for a, b in zip(mesh, answer["frontend_ms"], strict=True)],
        aims.MESH_PART: [a - b for a, b in zip(answer["frontend_ms"], answer["prefill_ms"], strict=True)],
    }
    for name, values in parts.items():
        results.add(NAME, TTFT_CASE, name, "ms", _quantile(values, 0.5))
    call_ms = _quantile(answer["prefill_ms"], 0.5) - _quantile(triton, 0.5)
    results.add(NAME, TTFT_CASE, aims.CALL_PART, "ms", call_ms)


def _quantile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


def _run_case(
    results: Results,
    pace: Pace,
    case: Case,
    client: Process,
    decode: Process,
    meters: dict[str, Callable[[], int]],
) -> None:
    client.ask("open", streams=case.streams, prompt=PROMPT_TOKENS, tokens=OUTPUT_TOKENS)
    time.sleep(pace.warm_s)
    rows, flushes = (
        decode.metric("kvmesh_decode_sent_tokens_total"),
        decode.metric("kvmesh_decode_gather_flushes_total"),
    )
    before, first = {who: read() for who, read in meters.items()}, client.ask("counters")
    started_s = time.monotonic()
    time.sleep(pace.window_s)
    after, last = {who: read() for who, read in meters.items()}, client.ask("counters")
    ended_s = time.monotonic()
    rows = decode.metric("kvmesh_decode_sent_tokens_total") - rows
    flushes = decode.metric("kvmesh_decode_gather_flushes_total") - flushes
    tokens = last["tokens"] - first["tokens"]
    messages = last["frames"] - first["frames"]
    if not tokens:
        results.problem(NAME, "no token arrived in the window", case)
        return
    results.add(NAME, str(case), "tokens per second", "tokens/s", tokens / (ended_s - started_s))
    results.add(NAME, str(case), aims.ROWS, "rows", rows / (flushes or 1))
    results.add(NAME, str(case), "tokens per client message", "tokens", tokens / messages)
    for who in meters:
        results.add(
            NAME, str(case), f"{aims.PER_TOKEN}, {who}", "us", (after[who] - before[who]) / 1e3 / tokens
        )
    check_faults(results, NAME, case, client)
    client.ask("close")
    time.sleep(0.5)
