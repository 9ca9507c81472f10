"""What mutual TLS costs: the router with every neighbour under TLS, beside the same without."""

from __future__ import annotations

import time
from pathlib import Path

from bench import aims
from bench.processes import Fleet
from bench.results import Results
from bench.scenarios.router import (
    ANSWER_TOKENS,
    CONFIG,
    ENDLESS,
    PER_S,
    PROMPT_TOKENS,
    source_of,
    wait_attached,
)
from bench.windows import Case, Pace, add_rate_figures, add_stream_figures, check_faults, measure
from kvmesh.cli.certificates import certificates, trust_keys

NAME = "trust"
CASE = Case(64, 20)
WAYS = ("plain text", "TLS")


def run(results: Results, pace: Pace) -> None:
    """Measure one repeat of each way, one after the other."""
    for way in WAYS:
        with Fleet() as fleet:
            folder = fleet.folder / "certificates" if way == "TLS" else None
            if folder is not None:
                certificates(folder, "kvmesh")
            _run(results, pace, way, fleet, folder)


def _run(results: Results, pace: Pace, way: str, fleet: Fleet, folder: Path | None) -> None:
    redis_url = fleet.redis()
    config = fleet.config({**CONFIG, **({"trust": trust_keys(folder)} if folder else {})})
    more = ("--certificates", str(folder)) if folder else ()
    sources = [source_of(fleet, role, f"{role}-0", redis_url, *more) for role in ("prefill", "decode")]
    router = fleet.service("router", "router-0", config, redis_url)
    wait_attached(sources)
    time.sleep(1.0)
    sink = fleet.neighbour("sink", "bench.sink", "--target", router.address, *more)

    for source in sources:
        source.ask("pace", step_ms=CASE.step_ms)
    sink.ask("open", streams=CASE.streams, prompt=PROMPT_TOKENS, tokens=ENDLESS)
    time.sleep(pace.warm_s)
    add_stream_figures(results, NAME, CASE, measure([router.pid], sink, pace.window_s), way=way)
    check_faults(results, NAME, f"{CASE}, {way}", sink)
    sink.ask("close")
    time.sleep(0.2)

    sink.ask("rate", per_s=PER_S, prompt=PROMPT_TOKENS, tokens=ANSWER_TOKENS)
    time.sleep(pace.warm_s)
    case = f"{aims.RATE_200}, {way}"
    add_rate_figures(results, NAME, case, measure([router.pid], sink, pace.rate_s), PER_S)
    check_faults(results, NAME, case, sink)
    sink.ask("close")
