"""Decisions: what placing one prompt of 64 blocks costs a router, by replicas and by blocks in its index."""

from __future__ import annotations

from bench import aims
from bench.processes import TEST_CORE, Fleet
from bench.results import ScenarioResults
from bench.windows import Pace

FILL_TIMEOUT_S = 300.0
REPLICAS = (8, 64, 1000)
SIZES = {"10k": 10_240, "1M": 1_024_000}
FULL_SIZES = {**SIZES, "10M": 10_240_000}
QUICK_REPLICAS = (8, 1000)
REQUESTS = 600


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    for name, blocks in (FULL_SIZES if pace.is_full else SIZES).items():
        for replicas in QUICK_REPLICAS if pace.is_quick else REPLICAS:
            with Fleet() as fleet:
                probe = fleet.neighbour("policy", "bench.placement_probe", TEST_CORE)
                filled = probe.ask("fill", replicas=replicas, blocks=blocks, timeout_s=FILL_TIMEOUT_S)
                decided = probe.ask("decide", requests=REQUESTS, timeout_s=FILL_TIMEOUT_S)
            case = aims.placement_case(replicas, name)
            if blocks > SIZES["10k"]:  # below, the growth of a process tells little
                results.add(case, "memory per block", "bytes", filled["bytes_per_block"])
            results.add(case, aims.DECISION, "us", decided["p50_us"])
            results.add(case, "CPU of a decision, p99", "us", decided["p99_us"])
            results.add(case, "CPU of what is learnt of a request, p50", "us", decided["lesson_us"])
