"""The budget of frames without content: a burst, a rate, and what sent messages earn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.http2.control_budget import BURST, PER_MESSAGE, PER_S, ControlBudget


@given(st.lists(st.tuples(st.integers(0, 500), st.floats(0, 2), st.integers(0, 200)), max_size=60))
def test_no_schedule_gets_more_than_the_burst_the_rate_and_what_it_earned(
    schedule: list[tuple[int, float, int]],
) -> None:
    budget, now_s, spent, earned = ControlBudget(0.0), 0.0, 0, 0
    for frames, pause_s, messages in schedule:
        now_s += pause_s
        budget.earn(messages)
        earned += messages
        if not budget.spend(frames, now_s):
            return
        spent += frames
        assert spent <= BURST + PER_S * now_s + PER_MESSAGE * earned + 1e-6


def test_a_flood_ends_and_a_pause_helps() -> None:
    budget = ControlBudget(0.0)
    assert budget.spend(int(BURST), 0.0)
    assert not budget.spend(1, 0.0)
    assert budget.spend(int(PER_S) - 1, 1.0)
