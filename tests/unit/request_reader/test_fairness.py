"""A caller that opens calls without messages (slowloris) delays no other caller: random schedules in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvmesh.unread_calls import READ_MIN_S, WAIT_S, UnreadCalls
from tests.unit.request_reader.crowd import Arrival, Crowd

READERS, CALLS_MAX = 15, 2_000
"""A frontend with defaults."""

SECONDS = 3.0
HONEST_S = 1.0
ROUNDING_S = 1e-6
HONEST = st.lists(
    st.tuples(st.integers(0, 4), st.floats(0, SECONDS), st.floats(0, 0.1)), min_size=1, max_size=60
)
"""Caller, time of its headers, time from them to the message."""


def attack(rate: int, connections: int) -> list[Arrival]:
    """Return the calls of one tenant that sends only headers, over some connections."""
    return [
        Arrival(number / rate, ("attacker", number % connections), None)
        for number in range(int(rate * SECONDS))
    ]


def crowd(arrivals: list[Arrival]) -> Crowd:
    """Run all arrivals, and check that no call is left."""
    made = Crowd(UnreadCalls(CALLS_MAX, READERS))
    made.run(arrivals)
    assert not len(made.unread) and made.unread.is_empty
    assert len(made.read_s) + len(made.refused_s) == len(arrivals)
    assert all(waited_s <= WAIT_S + ROUNDING_S for waited_s in made.never_read)
    return made


@settings(max_examples=12)
@given(st.sampled_from([20, 60, 100, 200, 400, 1_000, 3_000, 8_000]), st.integers(1, 20), HONEST)
@example(150, 1, [(0, 0.2 * number, 0.0) for number in range(15)])
@example(1_000, 1, [(0, 0.2 * number, 0.1) for number in range(15)])
def test_honest_calls_are_read_within_a_second(
    rate: int, connections: int, honest: list[tuple[int, float, float]]
) -> None:
    """This holds for any rate of another tenant's calls without messages, and for any number of its connections."""
    mine = [
        Arrival(at_s, (f"tenant-{name}", "c"), message_s)
        for name, at_s, message_s in {each[:2]: each for each in honest}.values()
    ]
    made = crowd(sorted([*attack(rate, connections), *mine], key=lambda each: each.at_s))
    assert not set(mine) & set(made.refused_s)
    assert max(made.read_s[each] for each in mine) < HONEST_S


@pytest.mark.parametrize("rate", [150, 3_000])
def test_connections_of_one_tenant_share_its_reads(rate: int) -> None:
    """A client of the same tenant on a connection of its own is read as well."""
    mine = [Arrival(0.1 * number, ("attacker", "own"), 0.1) for number in range(29)]
    made = crowd([*attack(rate, 1), *mine])
    assert max(made.read_s[each] for each in mine) < HONEST_S


def test_a_slow_message_keeps_its_reader_beside_a_caller_with_more() -> None:
    """The caller with the most reads loses one, not the caller with the longest read."""
    slow = Arrival(0.0, ("slow", "c"), 2.5)
    made = crowd([slow, *attack(400, 1)])
    assert made.read_s[slow] == 2.5


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 2), st.none() | st.floats(0, 12)), max_size=60))
def test_every_call_ends_and_frees_its_slot(calls: list[tuple[int, float, float | None]]) -> None:
    """This holds for slow calls too. A call keeps its reader for at least READ_MIN_S."""
    arrivals = {Arrival(at_s, (caller,), message_s) for caller, at_s, message_s in calls}
    made = Crowd(UnreadCalls(12, 3))
    made.run(list(arrivals))
    assert not len(made.unread) and made.unread.is_empty
    assert all(took_s >= READ_MIN_S - ROUNDING_S for took_s in made.refused_s.values() if took_s)
