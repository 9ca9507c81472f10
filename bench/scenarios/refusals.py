"""What refusing costs the frontend: on the wire beside the floor of grpc.aio, and its own code alone."""

from __future__ import annotations

import time

from bench import aims
from bench.processes import TEST_CORE, Fleet, Process
from bench.refusals import CASES, TABLES
from bench.results import ScenarioResults
from bench.windows import Pace, measure

CALLS = 32
"""Calls at a time."""

FLOOR = "a server that refuses at once"


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    with Fleet() as fleet:
        floor = fleet.neighbour("floor", "bench.refusals", TEST_CORE, part="floor")
        _run_case(results, pace, FLOOR, "", floor, _callers(fleet, floor))
    with Fleet() as fleet:
        fleet.configure(TABLES)
        frontend = fleet.service("frontend", "frontend-0")
        callers = _callers(fleet, frontend)
        for case in ("unknown key", "quota"):
            _run_case(results, pace, case, CASES[case], frontend, callers)
    with Fleet() as fleet:
        # One request fills the frontend: there is no router, so it waits for one.
        fleet.configure({"frontend": {"max_live_requests": 1}})
        frontend = fleet.service("frontend", "frontend-0")
        _run_case(results, pace, "in-flight cap", CASES["in-flight cap"], frontend, _callers(fleet, frontend))
    with Fleet() as fleet:
        own = fleet.neighbour("own", "bench.refusals", TEST_CORE, part="own", target=fleet.redis())
        for case in CASES:
            spent_us = own.ask("measure", case=case, seconds=pace.window_s / 2)["us"]
            results.add(case, aims.OWN_REFUSAL, "us", spent_us)


def _callers(fleet: Fleet, server: Process) -> Process:
    return fleet.neighbour(
        f"callers-of-{server.name}", "bench.refusals", part="callers", target=server.address
    )


def _run_case(
    results: ScenarioResults, pace: Pace, case: str, key: str, server: Process, callers: Process
) -> None:
    callers.ask("open", calls=CALLS, key=key)
    time.sleep(pace.warm_s)
    window = measure(server, callers, pace.window_s)
    callers.ask("close")
    refused = window.counts["refused"]
    if not refused:
        results.problem("nothing was refused", case)
        return
    if window.counts["served"] > 0.01 * refused:
        results.problem(f"{window.counts['served']:.0f} requests were served", case)
    results.add(case, aims.PER_REFUSAL, "us", window.cpu_s / refused * 1e6)
    results.add(case, "refusals per second of CPU", "1/s", refused / window.cpu_s)
    results.add(case, "refusals per second", "1/s", refused / window.seconds)
