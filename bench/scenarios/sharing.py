"""Routers beside each other: how soon each knows what the others have dispatched."""

from __future__ import annotations

from bench.processes import ANY_CORE, BenchError, Fleet, ask_all
from bench.results import ScenarioResults
from bench.windows import Pace

ROUTERS = (2, 4)
PER_S = 50
"""Dispatches of each router."""


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    seconds = 4.0 if pace.is_quick else 10.0
    for count in ROUTERS:
        with Fleet() as fleet:
            redis_url = fleet.redis()
            names = [f"router-{number}" for number in range(count)]
            probes = [
                fleet.neighbour(name, "bench.dispatch_probe", ANY_CORE, name=name, redis=redis_url)
                for name in names
            ]
            ask_all(probes, "meet", routers=names)
            told = ask_all(probes, "dispatch", per_s=PER_S, seconds=seconds)
            heard = ask_all(probes, "tell")
            left = sum(each["left"] for each in heard)
            if left:
                raise BenchError(f"{left:.0f} dispatches are still counted after their finish")
            case = f"{count} routers, {PER_S} dispatches/s each"
            for name in ("p50", "p99", "max"):
                worst = max(each[f"{name}_ms"] for each in heard)
                results.add(case, f"until a neighbour counts it, {name}", "ms", worst)
            results.add(case, "CPU per own dispatch", "us", max(each["cpu_us"] for each in told))
            results.add(case, "found out by roll calls", "", sum(each["healed"] for each in heard))
