"""The cost of mutual TLS: the router with and without TLS to all its peers."""

from __future__ import annotations

from pathlib import Path

from bench import aims
from bench.processes import Fleet
from bench.results import ScenarioResults
from bench.scenarios.router import PER_S, ask_pace, source_of, wait_attached
from bench.windows import LONG_SEQUENCES, Case, Pace, SystemUnderTest
from kvmesh.cli.certificates import certificates, trust_keys

CASE = Case(64, 20)
WAYS = ("plain text", "TLS")


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat of each way, one after the other."""
    for way in WAYS:
        with Fleet() as fleet:
            folder = fleet.folder / "certificates" if way == "TLS" else None
            if folder is not None:
                certificates(folder, "kvmesh")
            _run(results, pace, way, fleet, folder)


def _run(results: ScenarioResults, pace: Pace, way: str, fleet: Fleet, folder: Path | None) -> None:
    fleet.configure({**LONG_SEQUENCES, **({"trust": trust_keys(folder)} if folder else {})})
    more = {"certificates": folder} if folder else {}
    sources = [source_of(fleet, role, f"{role}-0", **more) for role in ("prefill", "decode")]
    router = fleet.service("router", "router-0")
    wait_attached(router, sources)
    sink = fleet.start_ready("sink", "bench.sink", target=router.address, **more)
    ask_pace(sources, CASE.step_ms)
    tested = SystemUnderTest(results, pace, router, sink, way=way)
    tested.streams(CASE)
    tested.rate(aims.RATE_200, PER_S)
