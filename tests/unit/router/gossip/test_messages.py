"""Gossip messages survive encoding; damaged ones are one typed error; times travel as ages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.router.gossip.messages import Digest, Entry, GossipError, Message, RepairRequest, decode, encode
from services.router.placement.policy import Dispatched, Finished, Hit, Measured, Started
from services.router.placement.precedence import Precedence

HERE_S, THERE_S = 7.0, 1e6
"""The same moment on two clocks."""

REQUESTS = st.integers(0, 2**128 - 1).map(lambda value: f"{value:032x}")
NAMES = st.text(min_size=1, max_size=20)
HASHES = st.lists(st.integers(0, 2**64 - 1), max_size=10).map(tuple)
COUNTS = st.integers(0, 2**32 - 1)
HITS = st.builds(
    Hit, COUNTS, COUNTS, COUNTS, st.integers(0, 10_000).map(lambda milliseconds: milliseconds / 1000)
)
PRECEDENCES = st.one_of(
    st.none(),
    st.builds(
        Precedence,
        st.integers(0, 255),
        st.booleans(),
        st.text(max_size=20),
        st.floats(0.001, 1e9),
        st.integers(-(2**31) + 1, 2**31 - 1),
    ),
)
AGES = st.integers(0, 6)
"""Whole seconds: they are the same on both clocks."""


def at(clock_s: float) -> st.SearchStrategy[list[Message]]:
    """Return messages with times relative to `clock_s` as now."""
    moments = AGES.map(lambda age: clock_s - age)
    return st.lists(
        st.one_of(
            st.builds(
                lambda request, replica, hashes, at_s, precedence, tokens: Dispatched(
                    "r", request, replica, hashes, 0.5, at_s, clock_s + 60 + 5, precedence, tokens, clock_s
                ),
                *(REQUESTS, NAMES, HASHES, moments, PRECEDENCES, st.integers(0, 2**32 - 1)),
            ),
            st.builds(lambda request, at_s: Started("r", request, at_s), REQUESTS, moments),
            st.builds(
                lambda request, hit: Finished("r", request, clock_s, hit),
                *(REQUESTS, st.one_of(st.none(), HITS)),
            ),
            st.builds(Measured, NAMES, HITS, moments),
            st.builds(
                Digest,
                st.dictionaries(
                    NAMES,
                    st.dictionaries(REQUESTS, st.one_of(st.none(), moments), max_size=3),
                    max_size=3,
                ),
                st.booleans(),
            ),
            st.builds(RepairRequest, NAMES, NAMES, st.lists(REQUESTS, max_size=3).map(tuple)),
        ),
        max_size=5,
    )


@given(at(HERE_S))
def test_messages_survive_encoding(found: list[Message]) -> None:
    """Every field survives."""
    entry = Entry("r", "boot", 2**40, found)
    assert decode(encode(entry, HERE_S), HERE_S, 60.0) == entry


@given(st.data())
def test_times_are_of_the_readers_clock(data: st.DataObject) -> None:
    """An event three seconds before the sending is three seconds old for the reader, whatever the two clocks."""
    seed = data.draw(st.integers(0, 5))
    there, here = (
        Entry(
            "r",
            "b",
            1,
            [
                Dispatched("r", "a" * 32, "p", (1,), 0.5, clock_s - seed, clock_s + 65, received_s=clock_s),
                Started("r", "a" * 32, clock_s - seed),
                Digest({"p": {"a" * 32: clock_s - seed, "b" * 32: None}}),
            ],
        )
        for clock_s in (THERE_S, HERE_S)
    )
    assert decode(encode(there, THERE_S), HERE_S, 60.0) == here


@given(at(HERE_S), st.data())
def test_damaged_messages_are_a_value_or_a_typed_error(found: list[Message], data: st.DataObject) -> None:
    """Cut, flipped, extended and foreign bytes raise only GossipError."""
    damaged = bytearray(encode(Entry("r", "boot", 1, found), HERE_S))
    for _ in range(data.draw(st.integers(0, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    for raw in (cut, bytes(damaged) + data.draw(st.binary(max_size=4)), data.draw(st.binary(max_size=60))):
        try:
            assert isinstance(decode(raw, HERE_S, 60.0), Entry)
        except GossipError as error:
            assert str(error)
