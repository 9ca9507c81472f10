"""Deadlines: what remains on the wire and moments on a clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmesh import deadlines


@given(st.integers(0, deadlines.REMAINING_MS_MAX), st.floats(0, 1e6))
def test_a_hop_ends_before_its_caller(remaining_ms: int, now_s: float) -> None:
    """What goes on behind a hop is always less than what it was given."""
    moment_s = deadlines.from_remaining_ms(remaining_ms, now_s)
    assert moment_s < now_s + remaining_ms / 1000
    assert deadlines.remaining_ms(moment_s, now_s) <= max(0, remaining_ms - 4)


def test_a_passed_deadline_has_nothing_left() -> None:
    """0 means expired; it never turns negative or wraps."""
    assert deadlines.remaining_ms(10.0, 11.0) == 0
    assert deadlines.remaining_ms(1e9, 0.0) == deadlines.REMAINING_MS_MAX


def test_the_earliest_moment_counts() -> None:
    """Moments that are not set do not count."""
    assert deadlines.earliest(None, 3.0, 2.0) == 2.0
    assert deadlines.earliest(None, None) is None
