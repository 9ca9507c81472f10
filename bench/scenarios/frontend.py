"""The frontend alone: a source plays its router, a process with many Generate calls plays its clients."""

from __future__ import annotations

import time

from bench import aims
from bench.processes import Fleet
from bench.results import Results
from bench.windows import LONG_SEQUENCES, Pace, SystemUnderTest

NAME = "frontend"
PER_S = 200


def run(results: Results, pace: Pace) -> None:
    """Measure one repeat."""
    with Fleet() as fleet:
        redis_url = fleet.redis()
        config = fleet.config(LONG_SEQUENCES)
        source = fleet.neighbour("source", "bench.source", role="router", id="router-0", redis=redis_url)
        frontend = fleet.service("frontend", "frontend-0", config, redis_url)
        time.sleep(2.0)  # membership is polled once a second
        client = fleet.neighbour("client", "bench.client", target=frontend.address)
        tested = SystemUnderTest(NAME, results, pace, frontend, client)
        tested.idle()
        for case in (*pace.cases, *pace.double_cases):
            source.ask("pace", step_ms=case.step_ms, phases=case.replicas)
            tested.streams(case, [source], sees_frames=False)
        tested.rate(aims.RATE_200, PER_S)
