"""The floor: what the Attach library and grpc.aio cost by themselves.

A source and a sink with nothing between bound every relay; a server of the client API with nothing behind bounds the
frontend.
"""

from __future__ import annotations

import statistics
import time

from bench import accounting, aims
from bench.processes import ANY_CORE, TEST_CORE, Fleet, Process
from bench.results import Results
from bench.windows import QUICK_CASES, Case, Pace, add_stream_figures, check_faults, measure

NAME = "floor"
PROMPT_TOKENS = 256
ENDLESS = 500_000
ANSWER_TOKENS = 4
LATENCY_CASE = "one request at a time"
LATENCY_PER_S = 30
LATENCY_S = 2.0


def run(results: Results, pace: Pace) -> None:
    """Measure one repeat."""
    with Fleet() as fleet:
        source = fleet.neighbour("source", "bench.source", "--role", "router", "--id", "source-0")
        sink = fleet.neighbour("sink", "bench.sink", "--target", source.address, core=TEST_CORE)
        for case in QUICK_CASES:
            _run_frames(results, pace, case, source, sink)
        sink.ask("rate", per_s=200, prompt=PROMPT_TOKENS, tokens=ANSWER_TOKENS)
        time.sleep(pace.warm_s)
        window = measure([source.pid], sink, pace.rate_s)
        sink.ask("close")
        spent_ms = window.cpu_s * 1e3 / window.counts["finished"]
        results.add(NAME, aims.RATE_200, "CPU per request of the writer", "ms", spent_ms)
    with Fleet() as fleet:
        source = fleet.neighbour(
            "source", "bench.source", "--role", "decode", "--id", "source-0", core=ANY_CORE
        )
        sink = fleet.neighbour(
            "sink", "bench.sink", "--target", source.address, "--phase", "local", core=ANY_CORE
        )
        results.add(NAME, LATENCY_CASE, aims.ATTACH_TRIP, "ms", _latency_ms(sink))
        edge = fleet.neighbour("edge-anywhere", "bench.edge", core=ANY_CORE)
        client = fleet.neighbour("client-anywhere", "bench.client", "--target", edge.address, core=ANY_CORE)
        edge.ask("pace", step_ms=1000)
        results.add(NAME, LATENCY_CASE, aims.EDGE_TRIP, "ms", _latency_ms(client))
    with Fleet() as fleet:
        edge = fleet.neighbour("edge", "bench.edge", core=TEST_CORE)
        client = fleet.neighbour("client", "bench.client", "--target", edge.address)
        for case in QUICK_CASES:
            _run_edge(results, pace, case, edge, client)
        edge.ask("pace", step_ms=20)
        client.ask("rate", per_s=200, prompt=PROMPT_TOKENS, tokens=ANSWER_TOKENS)
        time.sleep(pace.warm_s)
        window = measure([edge.pid], client, pace.rate_s)
        client.ask("close")
        spent_ms = window.cpu_s * 1e3 / (window.counts["started"] or 1)
        results.add(NAME, aims.RATE_200, "CPU per request of a server of the client API", "ms", spent_ms)


def _latency_ms(load: Process) -> float:
    """Return the median time to the first token of requests that come alone and have only that one."""
    load.ask("rate", per_s=LATENCY_PER_S, prompt=PROMPT_TOKENS, tokens=1)
    time.sleep(LATENCY_S)
    load.ask("close")
    return float(statistics.median(load.ask("counters")["ttft_ms"]))


def _run_frames(results: Results, pace: Pace, case: Case, source: Process, sink: Process) -> None:
    source.ask("pace", step_ms=case.step_ms)
    sink.ask("open", streams=case.streams, prompt=PROMPT_TOKENS, tokens=ENDLESS)
    time.sleep(pace.warm_s)
    before = accounting.cpu_ns(source.pid)
    window = measure([sink.pid], sink, pace.window_s)
    written_ns = accounting.cpu_ns(source.pid) - before
    add_stream_figures(results, NAME, case, window)
    frames = window.counts["frames"]
    if frames:
        results.add(NAME, str(case), aims.FRAME_WRITER, "us", written_ns / 1e3 / frames)
    check_faults(results, NAME, case, sink)
    sink.ask("close")


def _run_edge(results: Results, pace: Pace, case: Case, edge: Process, client: Process) -> None:
    edge.ask("pace", step_ms=case.step_ms)
    client.ask("open", streams=case.streams, prompt=PROMPT_TOKENS, tokens=ENDLESS)
    time.sleep(pace.warm_s)
    window = measure([edge.pid], client, pace.window_s)
    if window.counts["tokens"]:
        spent_us = window.cpu_s * 1e6 / window.counts["tokens"]
        results.add(NAME, str(case), aims.EDGE_WRITER, "us", spent_us)
    check_faults(results, NAME, case, client)
    client.ask("close")
    time.sleep(0.2)
