"""Times of heap trims."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.trim_schedule import FOLLOW_UPS, GROWTH_BYTES, TrimSchedule


def test_growth_is_followed_until_it_is_freed() -> None:
    """A process that has grown is trimmed at once and at some more checks."""
    trims = TrimSchedule(100 << 20)
    looks = []
    for _ in range(FOLLOW_UPS + 4):
        looks.append(trims.is_due(300 << 20))
        if looks[-1]:
            trims.done(300 << 20)
    assert looks == [True] * FOLLOW_UPS + [False] * 4
    assert trims.trimmed_total == FOLLOW_UPS


@given(st.lists(st.integers(0, GROWTH_BYTES - 1), min_size=1))
def test_a_process_without_growth_is_not_trimmed(noise: list[int]) -> None:
    """At any size, changes below GROWTH_BYTES cause no trim."""
    trims = TrimSchedule(1 << 30)
    assert not any(trims.is_due((1 << 30) + each) for each in noise)
