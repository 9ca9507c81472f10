"""Notes between routers survive the way through bytes; damaged ones are one typed error."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.router.dispatch_notes import NoteError, Notes, decode, encode
from services.router.holdings import Note
from services.router.policy import Dispatched, Finished, Hit, Started

REQUESTS = st.integers(0, 2**128 - 1).map(lambda value: f"{value:032x}")
NAMES = st.text(min_size=1, max_size=20)
HASHES = st.lists(st.integers(0, 2**64 - 1), max_size=10).map(tuple)


def dispatched(request: str, replica: str, hashes: tuple[int, ...], milliseconds: int) -> Note:
    prefill_s = milliseconds / 1000
    return Dispatched("r", request, replica, hashes, prefill_s, 7.0, 67.0 + 10 * prefill_s)


NOTES: st.SearchStrategy[list[Note]] = st.lists(
    st.one_of(
        st.builds(dispatched, REQUESTS, NAMES, HASHES, st.integers(0, 10_000)),
        st.builds(lambda request: Started("r", request, 7.0), REQUESTS),
        st.builds(
            lambda request, hit: Finished("r", request, 7.0, hit),
            REQUESTS,
            st.one_of(st.none(), st.integers(0, 2**32 - 1).map(lambda blocks: Hit(0, 0, blocks, 0.0))),
        ),
    ),
    max_size=5,
)


@given(NOTES)
def test_notes_come_back_as_they_were(notes: list[Note]) -> None:
    """Every field survives; times are the reader's."""
    assert decode(encode("r", "boot", notes), 7.0, 60.0) == Notes("r", "boot", notes)


@given(NOTES, st.data())
def test_damaged_notes_are_a_value_or_a_typed_error(notes: list[Note], data: st.DataObject) -> None:
    """Cut, flipped, extended and foreign bytes never raise anything but NoteError."""
    damaged = bytearray(encode("r", "boot", notes))
    for _ in range(data.draw(st.integers(0, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    for raw in (cut, bytes(damaged) + data.draw(st.binary(max_size=4)), data.draw(st.binary(max_size=60))):
        try:
            assert isinstance(decode(raw, 7.0, 60.0), Notes)
        except NoteError as error:
            assert str(error)
