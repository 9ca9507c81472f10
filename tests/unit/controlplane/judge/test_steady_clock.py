"""Wall time without its steps back."""

from __future__ import annotations

from controlplane.rollouts.judge.steady_clock import SteadyClock


def test_time_never_goes_back_and_goes_on_at_the_pace_of_the_clock() -> None:
    """Steps back are left out; a new leader with a slower clock continues at the last time."""
    clock = SteadyClock()
    assert [clock.at(wall_s) for wall_s in (100.0, 101.0, 41.0, 43.0, 40.0, 50.0)] == [
        100.0,
        101.0,
        101.0,
        103.0,
        103.0,
        113.0,
    ]
    later = SteadyClock(last_s=113.0)
    assert [later.at(wall_s) for wall_s in (20.0, 21.0)] == [113.0, 114.0]
