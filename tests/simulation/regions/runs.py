"""One run of simulated regions, with all checks."""

from __future__ import annotations

from tests.simulation.regions.schedule import Schedule


class SeedFailed(AssertionError):
    """A check or an assertion failed. The text begins with the seed; the cause is chained."""


def run(seed: int) -> Schedule:
    """Run one seed. Raises SeedFailed."""
    try:
        schedule = Schedule(seed)
        schedule.run()
    except Exception as error:
        raise SeedFailed(f"seed {seed}: {type(error).__name__}: {error}") from error
    return schedule
