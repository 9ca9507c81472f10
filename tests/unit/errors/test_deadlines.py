"""Deadline propagation: remaining times on the wire and deadlines on a clock."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from kvmesh import deadlines
from services.frontend.requests.request_spec import RUNTIME_GRACE_S


@given(st.integers(0, deadlines.REMAINING_MS_MAX), st.floats(0, 1e6))
def test_a_hop_ends_before_its_caller(remaining_ms: int, now_s: float) -> None:
    """The remaining time after a hop is always less than the time before it."""
    moment_s = deadlines.from_remaining_ms(remaining_ms, now_s)
    assert moment_s < now_s + remaining_ms / 1000
    assert deadlines.remaining_ms(moment_s, now_s) <= max(0, remaining_ms - 4)


@given(st.floats(0.1, deadlines.RUNTIME_MAX_S), st.floats(0, 1e6), st.lists(st.floats(0, 0.05), max_size=2))
@example(deadlines.RUNTIME_MAX_S, 0.0, [0.0, 0.0])
def test_no_hop_shortens_the_runtime_of_a_class(runtime_s: float, now_s: float, waits_s: list[float]) -> None:
    """The frontend ends a request at its deadline. Later hops end only requests that it missed, also after an hour."""
    end_s = now_s + runtime_s
    deadline_s = end_s + RUNTIME_GRACE_S
    for wait_s in (*waits_s, 0.0):  # the router, decode, and any further hop
        deadline_s = deadlines.from_remaining_ms(deadlines.remaining_ms(deadline_s, now_s), now_s)
        now_s += wait_s
        assert deadline_s >= end_s


def test_a_passed_deadline_has_nothing_left() -> None:
    """0 means expired. The value is never negative."""
    assert deadlines.remaining_ms(10.0, 11.0) == 0
    assert deadlines.remaining_ms(1e9, 0.0) == deadlines.REMAINING_MS_MAX


def test_the_earliest_time_counts() -> None:
    """None does not count."""
    assert deadlines.earliest(None, 3.0, 2.0) == 2.0
    assert deadlines.earliest(None, None) is None
