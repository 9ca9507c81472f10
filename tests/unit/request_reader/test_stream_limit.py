"""Open streams of a method: bounds and fairness over random schedules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import MeshError
from kvmesh.stream_limit import StreamLimit

MANY = 10


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abcd"), st.integers(0, 99)), max_size=80))
def test_the_largest_connection_loses_a_stream(steps: list[tuple[bool, str, int]]) -> None:
    """There are never more streams than allowed. A connection is refused only while no other one has more streams."""
    streams: StreamLimit[int] = StreamLimit("/Watch", MANY)
    live: dict[int, str] = {}
    for number, (is_opening, connection, chosen) in enumerate(steps):
        held = {each: list(live.values()).count(each) for each in "abcd"}
        if not is_opening and live:
            left = sorted(live)[chosen % len(live)]
            streams.close(live.pop(left), left)
        elif is_opening:
            try:
                evicted = streams.open(connection, number)
            except MeshError as error:
                assert error.reason == "CALLS_FULL" and error.retry_after_s
                assert len(live) == MANY and held[connection] + 1 >= max(held.values())
                continue
            assert (evicted is not None) == (len(live) == MANY)
            if evicted is not None:
                owner = live.pop(evicted)
                assert held[owner] == max(held.values())
                assert all(each > evicted for each, other in live.items() if other == owner)
            live[number] = connection
        assert len(streams) == len(live) <= MANY
    for number, connection in live.items():
        streams.close(connection, number)
    assert not len(streams) and not streams._connections


def test_one_connection_does_not_hold_all_streams() -> None:
    """Another connection gets a stream, and the first one loses its oldest. A connection with all streams is refused."""
    streams: StreamLimit[int] = StreamLimit("/Watch", MANY)
    for number in range(MANY):
        assert streams.open("one", number) is None
    with pytest.raises(MeshError, match="10 calls of /Watch are open, 10 of them of this connection; 10 are"):
        streams.open("one", 98)
    assert streams.open("other", 99) == 0
