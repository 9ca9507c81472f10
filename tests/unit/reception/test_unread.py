"""Calls whose message has not arrived: bounds and turns, over random schedules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import MeshError
from kvmesh.unread import LOOK_S, UnreadCall, UnreadCalls

STEPS = st.lists(st.tuples(st.sampled_from(["open", "close", "cut"]), st.floats(0, 0.3), st.integers(0, 99)))


@given(STEPS, st.integers(1, 6), st.integers(1, 4))
def test_bounds_hold_and_no_turn_is_lost(
    steps: list[tuple[str, float, int]], calls_max: int, readers_max: int
) -> None:
    """Never more than allowed; nothing waits beside a free turn; a cut has had its time, and others waited."""
    unread, live, now_s = UnreadCalls(calls_max, readers_max), list[UnreadCall](), 0.0
    for step, passed_s, chosen in steps:
        now_s += passed_s
        if step == "open":
            is_full = len(live) == calls_max
            try:
                call, displaced = unread.open(now_s)
                live.append(call)
                assert is_full == (displaced is not None)
                if displaced is not None:
                    assert displaced.is_cut and now_s >= displaced.opened_s + LOOK_S
                    live.remove(displaced)
                    assert unread.close(displaced, now_s) is None
            except MeshError as error:
                assert is_full and error.reason == "CALLS_FULL" and error.retry_after_s
        elif step == "close" and live:
            call = live.pop(chosen % len(live))
            was_read, waited = call in unread.reading, bool(unread.waiting)
            successor = unread.close(call, now_s)
            assert (successor is not None) == (was_read and waited)
        elif step == "cut":
            due_s = unread.next_cut_s()
            cut = unread.cut(now_s)
            assert (cut is not None) == (due_s is not None and due_s <= now_s)
            if cut is not None:
                assert unread.waiting and cut.reading_s is not None and now_s >= cut.reading_s + LOOK_S
        assert len(unread) == len(live) <= calls_max
        assert len(unread.reading) <= readers_max
        assert not unread.waiting or len(unread.reading) == readers_max
        assert all((call.reading_s is not None) == (call in unread.reading) for call in live)


def test_turns_go_to_the_oldest_until_it_waits_too_long() -> None:
    """In order while all are served in time; the newest first once they are not."""
    unread = UnreadCalls(10, 1)
    first, second, third, fourth = (unread.open(at_s)[0] for at_s in (0.0, 0.1, 0.2, 0.3))
    assert unread.close(first, 0.3) is second
    assert unread.close(second, 0.2 + LOOK_S + 0.01) is fourth
    assert unread.close(fourth, 0.5) is third
    assert unread.close(third, 0.5) is None and not len(unread)


def test_a_refusal_says_how_many_may_wait() -> None:
    """The error has the count, the limit, and when to come back."""
    unread = UnreadCalls(1, 1)
    unread.open(0.0)
    with pytest.raises(MeshError, match="1 calls wait") as caught:
        unread.open(0.0)
    assert caught.value.metadata == {"held": "1", "limit": "1"}
    assert unread.refused_total == 1
