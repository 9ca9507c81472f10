"""Watches of a method: bounds and fairness over random schedules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import MeshError
from kvmesh.stream_limit import StreamLimit

MANY = 10


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abcd"), st.integers(0, 99)), max_size=80))
def test_the_largest_connection_gives_way(steps: list[tuple[bool, str, int]]) -> None:
    """Never more than allowed; a connection is refused only while it has as many as any other."""
    watches: StreamLimit[int] = StreamLimit("/Watch", MANY)
    live: dict[int, str] = {}
    for number, (is_opening, connection, chosen) in enumerate(steps):
        held = {each: list(live.values()).count(each) for each in "abcd"}
        if not is_opening and live:
            left = sorted(live)[chosen % len(live)]
            watches.close(live.pop(left), left)
        elif is_opening:
            try:
                displaced = watches.open(connection, number)
            except MeshError as error:
                assert error.reason == "CALLS_FULL" and error.retry_after_s
                assert len(live) == MANY and held[connection] + 1 >= max(held.values())
                continue
            assert (displaced is not None) == (len(live) == MANY)
            if displaced is not None:
                owner = live.pop(displaced)
                assert held[owner] == max(held.values())
                assert all(each > displaced for each, other in live.items() if other == owner)
            live[number] = connection
        assert len(watches) == len(live) <= MANY
    for number, connection in live.items():
        watches.close(connection, number)
    assert not len(watches) and not watches._connections


def test_one_connection_does_not_hold_all_watches() -> None:
    """Another connection gets in, the first one loses its oldest; one that holds them all is refused."""
    watches: StreamLimit[int] = StreamLimit("/Watch", MANY)
    for number in range(MANY):
        assert watches.open("one", number) is None
    with pytest.raises(MeshError, match="10 calls of /Watch are open, 10 of them of this connection; 10 are"):
        watches.open("one", 98)
    assert watches.open("other", 99) == 0
