"""One run of a simulated control plane, with all checks."""

from __future__ import annotations

from tests.simulation.control.checkers import CHECKS
from tests.simulation.control.schedule import Schedule


def run(seed: int) -> Schedule:
    """Run one seed. Raises AssertionError with the seed."""
    schedule = Schedule(seed)
    schedule.run()
    for check in CHECKS:
        check(schedule.world)
    return schedule
