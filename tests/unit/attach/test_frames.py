"""Step frames: packed rows are read back unchanged, and malformed frames are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.attach import frames
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb

ids = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=8)
row_lists = st.lists(
    st.tuples(st.integers(1, 2**32 - 1), st.integers(0, 2**32 - 1), ids, st.booleans(), st.integers(0, 2)),
    max_size=40,
)


@given(row_lists)
def test_rows_come_out_as_they_went_in(table: list[tuple[int, int, list[int], bool, int]]) -> None:
    """A frame built by an outbox and parsed from its bytes gives the same rows, with all that is beside a token."""
    outbox = DownwardOutbox()
    for slot, position, tokens, with_logprobs, beside in table:
        logprobs = frames.pack_logprobs([-0.5] * len(tokens)) if with_logprobs else b""
        pairs = frames.pack_alternatives(tokens * beside, [-1.5] * len(tokens) * beside)
        outbox.tokens(slot, position, frames.pack_ids(tokens), logprobs, pairs)
    message = outbox.take(0.0) or pb.AttachResponse()
    parsed = pb.AttachResponse.FromString(message.SerializeToString())
    got = list(frames.rows(parsed.frame))
    assert [(row.slot, row.position, list(frames.unpack_ids(row.token_ids))) for row in got] == [
        (slot, position, tokens) for slot, position, tokens, _, _ in table
    ]
    for row, (_, _, tokens, with_logprobs, beside) in zip(got, table, strict=True):
        assert list(frames.unpack_alternatives(row.alternatives)[0]) == tokens * beside
        if with_logprobs:
            assert frames.unpack_logprobs(row.logprobs) == tuple([-0.5] * len(tokens))


@given(st.binary(max_size=400))
def test_any_bytes_give_rows_or_a_frame_error(data: bytes) -> None:
    """A hostile frame raises FrameError and no other error. Rows always agree with their counts."""
    try:
        frame = pb.StepFrame.FromString(data)
    except Exception:  # noqa: BLE001  # not a protobuf message at all: gRPC refuses it before us
        return
    try:
        rows = list(frames.rows(frame))
    except frames.FrameError:
        return
    for row in rows:
        assert len(row.token_ids) == 4 * row.count > 0


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=6),
    st.lists(st.integers(0, 2**32 - 1), max_size=6),
    st.lists(st.integers(0, 5), max_size=6),
    st.binary(max_size=60),
    st.binary(max_size=60),
)
def test_columns_that_disagree_are_refused(
    slots: list[int], positions: list[int], counts: list[int], tokens: bytes, logprobs: bytes
) -> None:
    """A frame is refused exactly when a column has the wrong length or a row is empty."""
    frame = pb.StepFrame(slots=slots, positions=positions, counts=counts, token_ids=tokens, logprobs=logprobs)
    sound = (
        len(slots) == len(positions) == len(counts)
        and len(tokens) == 4 * sum(counts)
        and len(logprobs) in (0, len(tokens))
        and 0 not in counts
    )
    if sound:
        assert len(list(frames.rows(frame))) == len(slots)
    else:
        with pytest.raises(frames.FrameError):
            frames.rows(frame)


@pytest.mark.parametrize(
    ("counts", "size", "text"),
    [
        ([1], 24, "alternative_counts has 1 numbers"),
        ([1, 21], 24, "up to 21"),
        ([1, 1], 32, "alternatives has 32 bytes; counts ask for 24"),
    ],
)
def test_alternatives_that_disagree_are_refused(counts: list[int], size: int, text: str) -> None:
    """A wrong number of counts, too many pairs, or another number of bytes."""
    frame = pb.StepFrame(slots=[1, 2], positions=[0, 0], counts=[1, 2], token_ids=bytes(12))
    frame.alternative_counts.extend(counts)
    frame.alternatives = bytes(size)
    with pytest.raises(frames.FrameError, match=text):
        frames.rows(frame)


def test_alternatives_without_rows_are_refused() -> None:
    """Bytes that belong to no row."""
    with pytest.raises(frames.FrameError, match="alternatives has 8 bytes; counts ask for 0"):
        frames.rows(pb.StepFrame(alternatives=bytes(8)))
