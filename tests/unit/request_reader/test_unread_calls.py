"""Calls without their message: bounds and reads over random schedules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import MeshError
from kvmesh.unread_calls import READ_MIN_S, WAIT_S, UnreadCall, UnreadCalls

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["open", "close", "end"]),
        st.floats(0, 0.3),
        st.integers(0, 99),
        st.sampled_from([("a", "1"), ("a", "2"), ("b", "1")]),
    )
)


@given(STEPS, st.integers(1, 8), st.integers(1, 4))
def test_bounds_hold_and_no_read_is_lost(
    steps: list[tuple[str, float, int, tuple[str, str]]], calls_max: int, readers_max: int
) -> None:
    """The limits hold, and no call waits beside a free reader. Only waiting calls evict others, after READ_MIN_S."""
    unread, live, now_s = UnreadCalls(calls_max, readers_max), list[UnreadCall](), 0.0
    for step, passed_s, chosen, caller in steps:
        now_s += passed_s
        if step == "open":
            try:
                live.append(unread.open(caller, now_s))
            except MeshError as error:
                assert live and error.reason == "CALLS_FULL" and error.retry_after_s
        elif step == "close" and live:
            call = live.pop(chosen % len(live))
            was_read, waited = call in unread.reading, bool(unread.waiting)
            assert (unread.close(call, now_s) is not None) == (was_read and waited)
        elif step == "end":
            due_s, waiting = unread.next_due_s(), list(unread.waiting)
            ended = unread.evict_due(now_s)
            assert bool(ended) == (due_s is not None and due_s <= now_s)
            for call in ended:
                if call.reading_s is None:
                    assert now_s >= call.opened_s + WAIT_S
                    live.remove(call)
                    assert unread.close(call, now_s) is None
                else:
                    assert waiting and now_s >= call.reading_s + READ_MIN_S
            assert not any(call.is_evicted for call in unread.waiting)
        assert len(unread) == len(live) <= calls_max
        assert len(unread.reading) <= readers_max
        assert not unread.waiting or len(unread.reading) == readers_max
        assert all((call.reading_s is not None) == (call in unread.reading) for call in live)
    for call in live:
        unread.close(call, now_s)
    assert not len(unread) and unread.is_empty


def test_reads_rotate_between_callers() -> None:
    """A caller without a reader precedes a caller with one. The calls of a caller are read in order of arrival."""
    unread = UnreadCalls(100, 2)
    first, second, third, fourth = (unread.open(("flood", "c"), at_s) for at_s in (0.0, 0.1, 0.2, 0.3))
    other = unread.open(("other", "c"), 0.4)
    assert unread.close(first, 0.5) is other
    assert unread.close(second, 0.6) is third
    assert unread.close(other, 0.7) is fourth
    assert unread.close(third, 0.8) is None and unread.close(fourth, 0.8) is None and unread.is_empty


def test_no_more_calls_are_evicted_than_wait() -> None:
    """One waiting call evicts one call, even if more calls have had their time."""
    unread = UnreadCalls(100, 4)
    reading = [unread.open(("a", "c"), 0.0) for _ in range(4)]
    waiting = unread.open(("b", "c"), 0.0)
    assert unread.evict_due(0.9) == reading[:1]
    assert unread.evict_due(0.95) == []
    assert unread.close(reading[0], 0.96) is waiting


def test_a_caller_leaves_capacity_for_others() -> None:
    """Without tenants one connection gets half of all calls. With tenants it gets a third, and other ones another."""
    plain, unread = UnreadCalls(90, 4), UnreadCalls(90, 4)
    assert opened(plain, ("one",)) == 45
    assert opened(plain, ("two",)) == 23
    assert opened(unread, ("a", "one")) == 30
    assert opened(unread, ("a", "two")) == 10
    assert opened(unread, ("b", "one")) == 17


def opened(unread: UnreadCalls, caller: tuple[str, ...]) -> int:
    """Return the number of calls that `caller` may open."""
    before = len(unread)
    with pytest.raises(MeshError):
        while True:
            unread.open(caller, 0.0)
    return len(unread) - before


def test_a_refusal_has_the_limit_of_waiting_calls() -> None:
    """The error has the count, the limit, and the retry delay."""
    unread = UnreadCalls(3, 1)
    for _ in range(2):
        unread.open(("one",), 0.0)
    with pytest.raises(
        MeshError, match="2 calls wait for their message, 2 of them of one caller; 1 are"
    ) as caught:
        unread.open(("one",), 0.0)
    assert caught.value.metadata == {"held": "2", "limit": "1"}
    assert caught.value.retry_after_s and unread.refused_total == 1
