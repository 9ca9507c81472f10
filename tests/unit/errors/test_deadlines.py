"""Deadlines: what remains on the wire and moments on a clock."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from kvmesh import deadlines
from services.frontend.requests.request_spec import RUNTIME_GRACE_S


@given(st.integers(0, deadlines.REMAINING_MS_MAX), st.floats(0, 1e6))
def test_a_hop_ends_before_its_caller(remaining_ms: int, now_s: float) -> None:
    """What goes on behind a hop is always less than what it was given."""
    moment_s = deadlines.from_remaining_ms(remaining_ms, now_s)
    assert moment_s < now_s + remaining_ms / 1000
    assert deadlines.remaining_ms(moment_s, now_s) <= max(0, remaining_ms - 4)


@given(st.floats(0.1, deadlines.RUNTIME_MAX_S), st.floats(0, 1e6), st.lists(st.floats(0, 0.05), max_size=2))
@example(deadlines.RUNTIME_MAX_S, 0.0, [0.0, 0.0])
def test_no_hop_cuts_what_its_class_allows(runtime_s: float, now_s: float, waits_s: list[float]) -> None:
    """The frontend ends it when its time is over, hops behind only what the frontend missed: also after a whole hour."""
    end_s = now_s + runtime_s
    deadline_s = end_s + RUNTIME_GRACE_S
    for wait_s in (*waits_s, 0.0):  # the router, decode, whoever else
        deadline_s = deadlines.from_remaining_ms(deadlines.remaining_ms(deadline_s, now_s), now_s)
        now_s += wait_s
        assert deadline_s >= end_s


def test_a_passed_deadline_has_nothing_left() -> None:
    """0 means expired; it never turns negative or wraps."""
    assert deadlines.remaining_ms(10.0, 11.0) == 0
    assert deadlines.remaining_ms(1e9, 0.0) == deadlines.REMAINING_MS_MAX


def test_the_earliest_moment_counts() -> None:
    """Moments that are not set do not count."""
    assert deadlines.earliest(None, 3.0, 2.0) == 2.0
    assert deadlines.earliest(None, None) is None
