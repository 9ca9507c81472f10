"""Regions under faults: deaths of several at once, cuts by direction, frozen and restarted control planes, peaks, drains.

Safety: no region refuses its own callers for another one's view; no grant is exceeded by more than what was in flight;
residency holds; panic takes nothing out; declared states survive lost memory. Liveness: weights are right again within a
bound after the last fault. `python -m tests.simulation.regions` runs thousands of seeds, and replays one.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.regions.runs import run

pytestmark = pytest.mark.timeout(900)  # all CPU: a busy machine takes its time

SEEDS = 100


def test_regions_are_safe_and_heal_under_faults() -> None:
    """Every seed keeps safety and liveness, and the seeds reach each state, spill, guests and panic."""
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = run(seed).world
        seen.update(what for _, _, what, _, _ in world.events)
        seen.update(
            spilled=world.traffic.spilled,
            guests=world.traffic.guests,
            panic=world.checkers.panics,
            outs_for_health=world.checkers.outs_for_health,
        )
    states = ("suspect", "out", "recovering", "healthy", "draining", "drained", "serving")
    assert all(seen[f"region.{state}"] >= SEEDS / 10 for state in states), seen
    assert min(seen["spilled"], seen["guests"]) >= 10 * SEEDS, seen
    assert min(seen["panic"], seen["outs_for_health"]) >= SEEDS / 10, seen
