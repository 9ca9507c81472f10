"""The frontend alone: a source is its router, a process with many Generate calls its clients."""

from __future__ import annotations

import time

from bench import aims
from bench.processes import Fleet
from bench.results import ScenarioResults
from bench.windows import LONG_SEQUENCES, Pace, SystemUnderTest

PER_S = 200


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    with Fleet() as fleet:
        fleet.configure(LONG_SEQUENCES)
        source = fleet.start_ready(
            "source", "bench.source", role="router", id="router-0", redis=fleet.redis_url
        )
        frontend = fleet.service("frontend", "frontend-0")
        time.sleep(2.0)  # membership is polled once a second
        client = fleet.start_ready("client", "bench.client", target=frontend.address)
        tested = SystemUnderTest(results, pace, frontend, client)
        tested.idle()
        for case in (*pace.cases, *pace.double_cases):
            source.ask("pace", step_ms=case.step_ms, phases=case.replicas)
            tested.streams(case, [source], sees_frames=False)
        tested.rate(aims.RATE_200, PER_S)
