"""The floor: a source and a sink with nothing between. What the Attach library and grpc.aio cost by themselves."""

from __future__ import annotations

import time

from bench import accounting, aims
from bench.processes import TEST_CORE, Fleet
from bench.results import Results
from bench.windows import Pace, add_stream_figures, check_faults, measure

NAME = "floor"
PROMPT_TOKENS = 256
ENDLESS = 500_000


def run(results: Results, pace: Pace) -> None:
    """Measure one repeat."""
    with Fleet() as fleet:
        source = fleet.neighbour("source", "bench.source", "--role", "router", "--id", "source-0")
        sink = fleet.neighbour("sink", "bench.sink", "--target", source.address, core=TEST_CORE)
        for case in pace.cases:
            source.ask("pace", step_ms=case.step_ms)
            sink.ask("open", streams=case.streams, prompt=PROMPT_TOKENS, tokens=ENDLESS)
            time.sleep(pace.warm_s)
            writing = accounting.usage(source.pid)
            window = measure([sink.pid], sink, pace.window_s)
            written = accounting.usage(source.pid)
            add_stream_figures(results, NAME, case, window)
            frames = window.counts["frames"]
            if frames:
                results.add(
                    NAME, str(case), aims.FRAME_WRITER, "us", (written.cpu_ns - writing.cpu_ns) / 1e3 / frames
                )
            check_faults(results, NAME, case, sink)
            sink.ask("close")
        sink.ask("rate", per_s=200, prompt=PROMPT_TOKENS, tokens=4)
        time.sleep(pace.warm_s)
        window = measure([source.pid], sink, pace.rate_s)
        sink.ask("close")
        results.add(
            NAME,
            aims.RATE_200,
            "CPU per request of the writer",
            "ms",
            window.cpu_s * 1e3 / window.counts["finished"],
        )
