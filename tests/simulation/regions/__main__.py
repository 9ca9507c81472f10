"""Runs seeds of simulated regions: `python -m tests.simulation.regions --seeds 10000`. `--seed N` replays one."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.simulation.regions.runs import SeedFailed, run


def main() -> int:
    """Run the seeds; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.regions", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, default=None, help="replay this one, with its events")
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.seeds) if given.seed is None else [given.seed]
    seen: Counter[str] = Counter()
    failed, began_s = [], time.monotonic()
    for seed in seeds:
        try:
            schedule = run(seed)
        except SeedFailed as failure:
            failed.append(seed)
            print(f"FAILED {failure}", flush=True)
            continue
        seen.update(what for _, _, what, _, _ in schedule.world.events)
        seen.update(spilled=schedule.world.traffic.spilled, guests=schedule.world.traffic.guests)
        if given.seed is not None:
            for event in schedule.world.events:
                print(*event)
    took_s = time.monotonic() - began_s
    print(f"{len(seeds)} seeds in {took_s:.0f} s, {len(failed)} failed: {failed}; seen: {dict(seen)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
