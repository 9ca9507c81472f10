"""The prefix index alone: lookups, memory, and how long loading it stalls the router."""

from __future__ import annotations

from bench.processes import TEST_CORE, Fleet
from bench.results import Results
from bench.windows import Pace

NAME = "index"
DEPTHS = (8, 64, 256)
SIZES = {"10k": 10_240, "100k": 102_400, "1M": 1_024_000}
FULL_SIZES = {**SIZES, "10M": 10_240_000}
QUICK_SIZES = {"10k": 10_240, "1M": 1_024_000}


def run(results: Results, pace: Pace) -> None:
    """Measure one repeat."""
    sizes = QUICK_SIZES if pace.is_quick else FULL_SIZES if pace.is_full else SIZES
    for name, blocks in sizes.items():
        with Fleet() as fleet:
            probe = fleet.neighbour("index", "bench.index_probe", core=TEST_CORE)
            filled = probe.ask("fill", blocks=blocks)
            case = f"{name} blocks"
            results.add(NAME, case, "memory per block", "bytes", filled["bytes_per_block"])
            results.add(NAME, case, "longest slice of loading", "ms", filled["slice_ms"])
            results.add(NAME, case, "loading, from memory", "s", filled["load_s"])
            for depth in DEPTHS:
                looked = probe.ask("lookup", depth=depth, blocks=blocks)
                results.add(
                    NAME, f"lookup of {depth} blocks, {name} in the index", "time", "us", looked["us"]
                )
