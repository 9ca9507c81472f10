"""The decode service alone: a sink plays its router; the engine runs in a real Triton server on the other core.

The cost includes the Triton client, which lives in the process under test.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bench import accounting, aims, engines
from bench.engines import Engine, EngineCosts
from bench.processes import NEIGHBOUR_CORE, Fleet, Process
from bench.results import Results
from bench.windows import Case, Pace, add_rate_figures, add_stream_figures, check_faults, measure

NAME = "decode"
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 4000
"""Longer than any window, short enough that 256 reservations fit the cache."""
ANSWER_TOKENS = 4
PER_S = 100
RATE_CASE = f"{PER_S} requests/s"

CONFIG: dict[str, dict[str, Any]] = {
    "engine": {"arithmetic": "hashed", "max_sequence_tokens": 8192, "kv_blocks": 60_000},
    "decode": {"slots_max": 1024},
    "telemetry": {"log_level": "warning"},
}


def run(results: Results, pace: Pace) -> None:
    """Measure one repeat."""
    with Fleet() as fleet:
        redis_url = fleet.redis()
        config = fleet.config(CONFIG)
        steps_ms = list(dict.fromkeys(case.step_ms for case in pace.cases))
        running = {
            step_ms: engines.start(
                fleet, f"engine-{step_ms:g}", EngineCosts(step_s=step_ms / 1000), NEIGHBOUR_CORE
            )
            for step_ms in steps_ms
        }
        for step_ms, engine in running.items():
            engines.wait_ready(engine)
            cases = [case for case in pace.cases if case.step_ms == step_ms]
            _run_engine(results, pace, fleet, engine, cases, redis_url, config)
            fleet.stop(engine.process)


def _run_engine(
    results: Results,
    pace: Pace,
    fleet: Fleet,
    engine: Engine,
    cases: list[Case],
    redis_url: str,
    config: Path,
) -> None:
    name = f"decode-{cases[0].step_ms:g}"
    decode = fleet.service("decode", name, config, redis_url, "--engine", engine.address)
    time.sleep(1.0)
    results.add(NAME, "idle", aims.IDLE, "MB", accounting.rss_bytes(decode.pid) / 1e6)
    sink = fleet.neighbour(f"sink-{name}", "bench.sink", "--target", decode.address, "--phase", "local")
    if cases[0].step_ms == 20:
        sink.ask("rate", per_s=PER_S, prompt=PROMPT_TOKENS, tokens=ANSWER_TOKENS)
        time.sleep(pace.warm_s)
        window = measure([decode.pid], sink, pace.rate_s)
        add_rate_figures(results, NAME, RATE_CASE, window, PER_S)
        check_faults(results, NAME, RATE_CASE, sink)
        sink.ask("close")
    for case in cases:
        _run_case(results, pace, case, decode, sink)
    if not engine.process.is_running():
        results.problem(NAME, f"{engine.process.name} died: {engine.process.log_tail()}")
    fleet.stop(sink, decode)


def _run_case(results: Results, pace: Pace, case: Case, decode: Process, sink: Process) -> None:
    sink.ask("open", streams=1, prompt=PROMPT_TOKENS, tokens=OUTPUT_TOKENS)
    before = accounting.rss_bytes(decode.pid)
    if case.streams > 1:
        sink.ask("open", streams=case.streams - 1, prompt=PROMPT_TOKENS, tokens=OUTPUT_TOKENS)
    time.sleep(pace.warm_s)
    window = measure([decode.pid], sink, pace.window_s)
    add_stream_figures(results, NAME, case, window)
    if case == pace.cases[0]:
        growth = accounting.rss_bytes(decode.pid) - before
        results.add(NAME, str(case), aims.STREAM_BYTES, "KB", growth / (case.streams - 1) / 1e3)
    check_faults(results, NAME, case, sink)
    sink.ask("close")
    time.sleep(0.5)
