"""The decode service alone: a sink is its router, and the engine runs in a real Triton server on the other core.

The cost includes the Triton client, which is part of the process under test.
"""

from __future__ import annotations

import time

from bench import engines
from bench.engines import Engine, EngineCosts
from bench.processes import LOAD_CORE, Fleet
from bench.results import ScenarioResults
from bench.windows import Case, Pace, SystemUnderTest

PROMPT_TOKENS = 32
OUTPUT_TOKENS = 4000
"""Longer than any window, short enough that 256 reservations fit the cache."""
PER_S = 100
RATE_CASE = f"{PER_S} requests/s"


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    with Fleet() as fleet:
        fleet.configure({"engine": engines.CONFIG, "decode": {"slots_max": 1024}})
        steps_ms = list(dict.fromkeys(case.step_ms for case in pace.cases))
        running = {}
        for step_ms in steps_ms:
            costs = EngineCosts(step_s=step_ms / 1000)
            running[step_ms] = engines.start(fleet, f"engine-{step_ms:g}", costs, LOAD_CORE)
        for step_ms, engine in running.items():
            engines.wait_ready(engine)
            cases = [case for case in pace.cases if case.step_ms == step_ms]
            _run_engine(results, pace, fleet, engine, cases)
            fleet.stop(engine.process)


def _run_engine(
    results: ScenarioResults, pace: Pace, fleet: Fleet, engine: Engine, cases: list[Case]
) -> None:
    name = f"decode-{cases[0].step_ms:g}"
    decode = fleet.service("decode", name, "--engine", engine.address)
    time.sleep(1.0)
    sink = fleet.start_ready(f"sink-{name}", "bench.sink", target=decode.address, phase="local")
    tested = SystemUnderTest(results, pace, decode, sink, PROMPT_TOKENS, OUTPUT_TOKENS)
    tested.idle()
    if cases[0].step_ms == 20:
        tested.rate(RATE_CASE, PER_S, PROMPT_TOKENS)
    for case in cases:
        tested.streams(case)
    if not engine.process.is_running():
        results.problem(f"{engine.process.name} ended: {engine.process.log_tail()}")
    fleet.stop(sink, decode)
