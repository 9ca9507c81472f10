"""The frontend alone: a source plays its router, a process with many Generate calls plays its clients."""

from __future__ import annotations

import time
from typing import Any

from bench import accounting, aims
from bench.processes import Fleet, Process
from bench.results import Results
from bench.windows import (
    Case,
    Pace,
    add_rate_figures,
    add_stream_figures,
    check_faults,
    check_source,
    frames_since,
    measure,
)

NAME = "frontend"
PROMPT_TOKENS = 256
ENDLESS = 500_000
ANSWER_TOKENS = 4
PER_S = 200

CONFIG: dict[str, dict[str, Any]] = {
    "engine": {"max_sequence_tokens": 1_000_000, "kv_blocks": 1_000_000},
    "frontend": {"max_output_tokens_max": 1_000_000},
    "telemetry": {"log_level": "warning"},
}


def run(results: Results, pace: Pace) -> None:
    """Measure one repeat."""
    with Fleet() as fleet:
        redis_url = fleet.redis()
        config = fleet.config(CONFIG)
        source = fleet.neighbour(
            "source", "bench.source", "--role", "router", "--id", "router-0", "--redis", redis_url
        )
        frontend = fleet.service("frontend", "frontend-0", config, redis_url)
        time.sleep(2.0)  # membership is polled once a second
        results.add(NAME, "idle", aims.IDLE, "MB", accounting.rss_bytes(frontend.pid) / 1e6)
        client = fleet.neighbour("client", "bench.client", "--target", frontend.address)
        for case in (*pace.cases, *pace.double_cases):
            _run_case(results, pace, case, frontend, client, source)
        client.ask("rate", per_s=PER_S, prompt=PROMPT_TOKENS, tokens=ANSWER_TOKENS)
        time.sleep(pace.warm_s)
        window = measure([frontend.pid], client, pace.rate_s)
        add_rate_figures(results, NAME, aims.RATE_200, window, PER_S)
        check_faults(results, NAME, aims.RATE_200, client)


def _run_case(
    results: Results, pace: Pace, case: Case, frontend: Process, client: Process, source: Process
) -> None:
    source.ask("pace", step_ms=case.step_ms, phases=case.replicas)
    client.ask(
        "open", streams=1, prompt=PROMPT_TOKENS, tokens=ENDLESS
    )  # what a first request loads is no stream's
    before = accounting.rss_bytes(frontend.pid)
    if case.streams > 1:
        client.ask("open", streams=case.streams - 1, prompt=PROMPT_TOKENS, tokens=ENDLESS)
    time.sleep(pace.warm_s)
    earlier = source.ask("counters")
    window = measure([frontend.pid], client, pace.window_s)
    add_stream_figures(results, NAME, case, window, frames_since(source, earlier))
    if case == pace.cases[0]:
        growth = accounting.rss_bytes(frontend.pid) - before
        results.add(NAME, str(case), aims.STREAM_BYTES, "KB", growth / (case.streams - 1) / 1e3)
    check_source(results, NAME, case, source, earlier)
    check_faults(results, NAME, case, client)
    client.ask("close")
    time.sleep(0.2)
