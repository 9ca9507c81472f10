"""The router alone: a sink plays its frontend, sources play prefill and decode replicas."""

from __future__ import annotations

import time
from typing import Any

from bench import accounting, aims
from bench.processes import BenchError, Fleet, Process
from bench.results import Results
from bench.windows import (
    Case,
    Pace,
    add_rate_figures,
    add_stream_figures,
    check_faults,
    check_source,
    measure,
)

NAME = "router"
PROMPT_TOKENS = 256
SHORT_PROMPT_TOKENS = 32
"""Below router.local_prefill_tokens_max."""
ENDLESS = 500_000
ANSWER_TOKENS = 4
PER_S = 200
ATTACH_TIMEOUT_S = 15.0

CONFIG: dict[str, dict[str, Any]] = {
    "engine": {"arithmetic": "hashed", "max_sequence_tokens": 1_000_000, "kv_blocks": 1_000_000},
    "frontend": {"max_output_tokens_max": 1_000_000},
    "telemetry": {"log_level": "warning"},
}


def run(results: Results, pace: Pace) -> None:
    """Measure one repeat."""
    with Fleet() as fleet:
        redis_url = fleet.redis()
        config = fleet.config(CONFIG)
        sources = [
            source_of(fleet, "prefill", "prefill-0", redis_url),
            source_of(fleet, "decode", "decode-0", redis_url),
        ]
        router = fleet.service("router", "router-0", config, redis_url)
        wait_attached(sources)
        time.sleep(1.0)
        results.add(NAME, "idle", aims.IDLE, "MB", accounting.rss_bytes(router.pid) / 1e6)
        sink = fleet.neighbour("sink", "bench.sink", "--target", router.address)
        for case in pace.cases:
            _run_case(results, pace, case, router, sink, sources)
        _run_rate(results, pace, aims.RATE_200, PROMPT_TOKENS, router, sink)
        _run_rate(
            results, pace, f"{aims.RATE_200}, decode runs the prompt", SHORT_PROMPT_TOKENS, router, sink
        )
        sources.append(source_of(fleet, "decode", "decode-1", redis_url))
        wait_attached(sources)
        time.sleep(1.0)
        for case in pace.double_cases:
            _run_case(results, pace, case, router, sink, sources)


def source_of(fleet: Fleet, role: str, name: str, redis_url: str, *more: str) -> Process:
    """Start a fake replica that registers."""
    return fleet.neighbour(name, "bench.source", "--role", role, "--id", name, "--redis", redis_url, *more)


def wait_attached(sources: list[Process]) -> None:
    """Wait until a router is attached to each of `sources`. Raises BenchError."""
    end_s = time.monotonic() + ATTACH_TIMEOUT_S
    while not all(source.ask("counters")["sessions"] for source in sources):
        if time.monotonic() > end_s:
            raise BenchError("the router did not attach to the sources")
        time.sleep(0.1)


def _run_case(
    results: Results, pace: Pace, case: Case, router: Process, sink: Process, sources: list[Process]
) -> None:
    for source in sources:
        source.ask("pace", step_ms=case.step_ms)
    sink.ask(
        "open", streams=1, prompt=PROMPT_TOKENS, tokens=ENDLESS
    )  # what a first request loads is no stream's
    before = accounting.rss_bytes(router.pid)
    if case.streams > 1:
        sink.ask("open", streams=case.streams - 1, prompt=PROMPT_TOKENS, tokens=ENDLESS)
    time.sleep(pace.warm_s)
    late = [source.ask("counters") for source in sources]
    window = measure([router.pid], sink, pace.window_s)
    add_stream_figures(results, NAME, case, window)
    if case == pace.cases[0]:
        growth = accounting.rss_bytes(router.pid) - before
        results.add(NAME, str(case), aims.STREAM_BYTES, "KB", growth / (case.streams - 1) / 1e3)
    for source, earlier in zip(sources, late, strict=True):
        if source.name.startswith("decode"):
            check_source(results, NAME, case, source, earlier)
    check_faults(results, NAME, case, sink)
    sink.ask("close")
    time.sleep(0.2)


def _run_rate(
    results: Results, pace: Pace, case: str, prompt_tokens: int, router: Process, sink: Process
) -> None:
    sink.ask("rate", per_s=PER_S, prompt=prompt_tokens, tokens=ANSWER_TOKENS)
    time.sleep(pace.warm_s)
    window = measure([router.pid], sink, pace.rate_s)
    add_rate_figures(results, NAME, case, window, PER_S)
    if window.counts["finished"]:
        messages = window.counts["messages"] / window.counts["finished"]
        results.add(NAME, case, "messages to the frontend per request", "", messages)
    check_faults(results, NAME, case, sink)
    sink.ask("close")
