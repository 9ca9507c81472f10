"""Runs seeds of the simulated lives: `python -m tests.simulation.lives --seeds 3000`. `--seed N` replays one."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.simulation.lives.runs import SeedFailed, run


def main() -> int:
    """Run the seeds; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.lives", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="number of seeds, from 0")
    parser.add_argument("--seed", type=int, default=None, help="replay this one, with its events")
    given = parser.parse_args()
    seeds = range(given.seeds) if given.seed is None else [given.seed]
    seen: Counter[str] = Counter()
    failed, began_s = [], time.monotonic()
    for seed in seeds:
        try:
            schedule = run(seed, shows_log=given.seed is not None)
        except SeedFailed as failure:
            failed.append(seed)
            print(f"FAILED {failure}", flush=True)
            continue
        seen.update(schedule.world.check.seen)
    took_s = time.monotonic() - began_s
    print(f"{len(seeds)} seeds in {took_s:.0f} s, {len(failed)} failed {failed[:20]}; seen: {dict(seen)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
