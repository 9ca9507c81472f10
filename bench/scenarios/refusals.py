"""What refusing costs the frontend: on the wire beside the floor of grpc.aio, and its own code alone."""

from __future__ import annotations

import time

from bench import aims
from bench.processes import TEST_CORE, Fleet, Process
from bench.refusals import CASES, TABLES
from bench.results import Results
from bench.windows import Pace, measure

NAME = "refusals"
CALLS = 32
"""Calls at a time."""

FLOOR = "a server that refuses at once"


def run(results: Results, pace: Pace) -> None:
    """Measure one repeat."""
    with Fleet() as fleet:
        floor = fleet.neighbour("floor", "bench.refusals", TEST_CORE, part="floor")
        _run_case(results, pace, FLOOR, "", floor, _callers(fleet, floor))
    with Fleet() as fleet:
        redis_url = fleet.redis()
        config = fleet.config(TABLES)
        frontend = fleet.service("frontend", "frontend-0", config, redis_url)
        callers = _callers(fleet, frontend)
        for case in ("unknown key", "quota"):
            _run_case(results, pace, case, CASES[case], frontend, callers)
    with Fleet() as fleet:
        redis_url = fleet.redis()
        # One request fills the frontend: there is no router, so it waits for one.
        config = fleet.config({"frontend": {"max_live_requests": 1}})
        frontend = fleet.service("frontend", "frontend-0", config, redis_url)
        _run_case(results, pace, "in-flight cap", CASES["in-flight cap"], frontend, _callers(fleet, frontend))
    with Fleet() as fleet:
        own = fleet.neighbour("own", "bench.refusals", TEST_CORE, part="own", target=fleet.redis())
        for case in CASES:
            spent_us = own.ask("measure", case=case, seconds=pace.window_s / 2)["us"]
            results.add(NAME, case, aims.OWN_REFUSAL, "us", spent_us)


def _callers(fleet: Fleet, server: Process) -> Process:
    return fleet.neighbour(
        f"callers-of-{server.name}", "bench.refusals", part="callers", target=server.address
    )


def _run_case(results: Results, pace: Pace, case: str, key: str, server: Process, callers: Process) -> None:
    callers.ask("open", calls=CALLS, key=key)
    time.sleep(pace.warm_s)
    window = measure(server, callers, pace.window_s)
    callers.ask("close")
    refused = window.counts["refused"]
    if not refused:
        results.problem(NAME, "nothing was refused", case)
        return
    if window.counts["served"] > 0.01 * refused:
        results.problem(NAME, f"{window.counts['served']:.0f} requests were served", case)
    results.add(NAME, case, aims.PER_REFUSAL, "us", window.cpu_s / refused * 1e6)
    results.add(NAME, case, "refusals per second of CPU", "1/s", refused / window.cpu_s)
    results.add(NAME, case, "refusals per second", "1/s", refused / window.seconds)
