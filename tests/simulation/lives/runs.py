"""One run of the simulated lives, with all checks."""

from __future__ import annotations

from tests.simulation.lives.schedule import Schedule


class SeedFailed(AssertionError):
    """A check, an assertion of the parts or anything else failed. The text begins with the seed; the cause is chained."""


def run(seed: int, *, shows_log: bool = False) -> Schedule:
    """Run one seed. Raises SeedFailed."""
    schedule = Schedule(seed)
    try:
        schedule.run()
    except Exception as error:
        world = schedule.world
        raise SeedFailed(f"seed {seed} at {world.now_s:.3f} s: {type(error).__name__}: {error}") from error
    finally:
        if shows_log:
            print("\n".join(schedule.world.log))
    return schedule
