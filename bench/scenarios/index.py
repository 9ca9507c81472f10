"""The prefix index alone: lookups, memory, and how long loading it or catching up with it stalls the router."""

from __future__ import annotations

from bench import aims
from bench.processes import ANY_CORE, TEST_CORE, Fleet, ask_all
from bench.results import ScenarioResults
from bench.windows import Pace

LOAD_TIMEOUT_S = 300.0
DEPTHS = (8, 64, 256)
SIZES = {"10k": 10_240, "100k": 102_400, "1M": 1_024_000}
FULL_SIZES = {**SIZES, "10M": 10_240_000}
QUICK_SIZES = {"10k": 10_240, "1M": 1_024_000}
BURST_ENTRIES = 100_000
ROUTERS = 16
ROUTERS_BLOCKS = 102_400
ROUTERS_ENTRIES = 10_000


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    sizes = QUICK_SIZES if pace.is_quick else FULL_SIZES if pace.is_full else SIZES
    for name, blocks in sizes.items():
        _one_router(results, name, blocks)
    if not pace.is_quick:
        _many_routers(results)


def _one_router(results: ScenarioResults, name: str, blocks: int) -> None:
    with Fleet() as fleet:
        redis_url = fleet.redis()
        writer = fleet.neighbour("replicas", "bench.index_probe")
        writer.ask("publish", redis=redis_url, blocks=blocks, timeout_s=LOAD_TIMEOUT_S)
        probe = fleet.neighbour("index", "bench.index_probe", TEST_CORE)
        loaded = probe.ask("load", redis=redis_url, blocks=blocks, timeout_s=LOAD_TIMEOUT_S)
        case = f"{name} blocks"
        results.add(case, "memory per block", "bytes", loaded["bytes_per_block"])
        results.add(case, "longest stall while loading", "ms", loaded["stall_ms"])
        results.add(case, aims.LOAD_BUSY, "ms", loaded["stall_cpu_ms"])
        results.add(case, "cold start", "s", loaded["seconds"])
        results.add(case, "CPU of a cold start", "s", loaded["cpu_s"])
        for depth in DEPTHS:
            looked = probe.ask("lookup", depth=depth, blocks=blocks)
            results.add(f"lookup of {depth} blocks, {name} in the index", "time", "us", looked["us"])
        writer.ask("publish_burst", redis=redis_url, entries=BURST_ENTRIES, timeout_s=LOAD_TIMEOUT_S)
        read = probe.ask("burst", entries=BURST_ENTRIES, timeout_s=LOAD_TIMEOUT_S)
        case = f"{name} blocks, a burst of {BURST_ENTRIES:,} events"
        results.add(case, "longest stall", "ms", read["stall_ms"])
        results.add(case, aims.BURST_BUSY, "ms", read["stall_cpu_ms"])
        results.add(case, "time", "s", read["seconds"])
        results.add(case, "CPU per event", "us", read["cpu_s"] / BURST_ENTRIES * 1e6)


def _many_routers(results: ScenarioResults) -> None:
    """16 routers start at once on both cores, then read the same events."""
    case = f"{ROUTERS} routers at once, 100k blocks each"
    with Fleet() as fleet:
        redis_url = fleet.redis()
        writer = fleet.neighbour("replicas", "bench.index_probe", ANY_CORE)
        writer.ask("publish", redis=redis_url, blocks=ROUTERS_BLOCKS)
        probes = [
            fleet.neighbour(f"router-{index}", "bench.index_probe", ANY_CORE) for index in range(ROUTERS)
        ]

        loaded = ask_all(probes, "load", redis=redis_url, blocks=ROUTERS_BLOCKS, timeout_s=LOAD_TIMEOUT_S)
        results.add(case, "cold start of the slowest", "s", max(one["seconds"] for one in loaded))
        results.add(case, aims.LOAD_BUSY, "ms", max(one["stall_cpu_ms"] for one in loaded))
        writer.ask("publish_burst", redis=redis_url, entries=ROUTERS_ENTRIES)
        read = ask_all(probes, "burst", entries=ROUTERS_ENTRIES, timeout_s=LOAD_TIMEOUT_S)
        seconds = max(one["seconds"] for one in read)
        results.add(case, f"the slowest has read {ROUTERS_ENTRIES:,} events", "s", seconds)
        results.add(case, aims.BURST_BUSY, "ms", max(one["stall_cpu_ms"] for one in read))
