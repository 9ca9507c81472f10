"""What budgets cost the frontend: a request admitted from a slab, one that asks Redis, and one that is refused."""

from __future__ import annotations

from bench import aims
from bench.processes import TEST_CORE, Fleet
from bench.results import ScenarioResults
from bench.windows import Pace

REQUESTS = 20_000
QUICK_REQUESTS = 5_000
TIMEOUT_S = 120.0


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    with Fleet() as fleet:
        redis_url = fleet.redis()
        probe = fleet.neighbour("admission", "bench.admission_probe", TEST_CORE)
        requests = QUICK_REQUESTS if pace.is_quick else REQUESTS
        told = probe.ask("admission", redis=redis_url, requests=requests, timeout_s=TIMEOUT_S)
    leased, unleased, many, refused = (told[name] for name in ("leased", "unleased", "many", "refused"))
    results.add(aims.LEASED, aims.ADMISSION, "us", many["admit_us"])
    results.add(aims.LEASED, "CPU of a settlement", "us", many["settle_us"])
    results.add(aims.LEASED, "CPU of both, round trips and timers included", "us", many["cpu_us"])
    results.add(aims.LEASED, aims.ADMISSION_LATENCY, "us", leased["latency_us"])
    results.add(aims.UNLEASED, aims.ADMISSION_LATENCY, "us", unleased["latency_us"])
    results.add(aims.UNLEASED, "CPU of both, round trips and timers included", "us", unleased["cpu_us"])
    results.add("refused", aims.REFUSAL, "us", refused["cpu_us"])
    for way, trip in told["trips"].items():
        case = f"a script that does nothing, by {way}"
        results.add(case, "round trip, p50", "us", trip["latency_us"])
        results.add(case, "CPU of a round trip", "us", trip["cpu_us"])
