"""One run of a simulated control plane, with all checks."""

from __future__ import annotations

from tests.simulation.control.checkers import CHECKS, check_verdicts
from tests.simulation.control.schedule import Schedule


class SeedFailed(AssertionError):
    """A check, an assertion of the cores or anything else failed. The text begins with the seed; the cause is chained."""


def run(seed: int) -> Schedule:
    """Run one seed. Raises SeedFailed."""
    try:
        schedule = Schedule(seed)
        schedule.run()
        for check in CHECKS:
            check(schedule.world)
        if schedule.is_judged:
            check_verdicts(schedule.world, is_bad=schedule.is_bad)
    except Exception as error:
        raise SeedFailed(f"seed {seed}: {type(error).__name__}: {error}") from error
    return schedule
