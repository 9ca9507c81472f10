"""The prefix index alone: lookups, memory, and how long loading it stalls the router."""

from __future__ import annotations

from bench.processes import TEST_CORE, Fleet
from bench.results import Results
from bench.windows import Pace

NAME = "index"
LOAD_TIMEOUT_S = 300.0
DEPTHS = (8, 64, 256)
SIZES = {"10k": 10_240, "100k": 102_400, "1M": 1_024_000}
FULL_SIZES = {**SIZES, "10M": 10_240_000}
QUICK_SIZES = {"10k": 10_240, "1M": 1_024_000}


def run(results: Results, pace: Pace) -> None:
    """Measure one repeat."""
    sizes = QUICK_SIZES if pace.is_quick else FULL_SIZES if pace.is_full else SIZES
    for name, blocks in sizes.items():
        with Fleet() as fleet:
            redis_url = fleet.redis()
            writer = fleet.neighbour("replicas", "bench.index_probe")
            writer.ask("publish", redis=redis_url, blocks=blocks, timeout_s=LOAD_TIMEOUT_S)
            fleet.stop(writer)
            probe = fleet.neighbour("index", "bench.index_probe", core=TEST_CORE)
            loaded = probe.ask("load", redis=redis_url, blocks=blocks, timeout_s=LOAD_TIMEOUT_S)
            case = f"{name} blocks"
            results.add(NAME, case, "memory per block", "bytes", loaded["bytes_per_block"])
            results.add(NAME, case, "longest stall while loading", "ms", loaded["stall_ms"])
            results.add(NAME, case, "most CPU between two turns of the loop", "ms", loaded["stall_cpu_ms"])
            results.add(NAME, case, "cold start", "s", loaded["seconds"])
            results.add(NAME, case, "CPU of a cold start", "s", loaded["cpu_s"])
            for depth in DEPTHS:
                looked = probe.ask("lookup", depth=depth, blocks=blocks)
                results.add(
                    NAME, f"lookup of {depth} blocks, {name} in the index", "time", "us", looked["us"]
                )
