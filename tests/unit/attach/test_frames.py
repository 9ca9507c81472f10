"""Step frames: what is packed comes back, and nothing else gets through."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.attach import frames
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb

ids = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=8)
row_lists = st.lists(
    st.tuples(st.integers(1, 2**32 - 1), st.integers(0, 2**32 - 1), ids, st.booleans()), max_size=40
)


@given(row_lists)
def test_rows_come_out_as_they_went_in(table: list[tuple[int, int, list[int], bool]]) -> None:
    """A frame built by an outbox and parsed from its bytes gives the same rows, log-probabilities included."""
    outbox = DownwardOutbox()
    for slot, position, tokens, with_logprobs in table:
        logprobs = frames.pack_logprobs([-0.5] * len(tokens)) if with_logprobs else b""
        outbox.tokens(slot, position, frames.pack_ids(tokens), logprobs)
    message = outbox.take(0.0) or pb.AttachResponse()
    parsed = pb.AttachResponse.FromString(message.SerializeToString())
    got = list(frames.rows(parsed.frame))
    assert [(row.slot, row.position, list(frames.unpack_ids(row.token_ids))) for row in got] == [
        (slot, position, tokens) for slot, position, tokens, _ in table
    ]
    for row, (_, _, tokens, with_logprobs) in zip(got, table, strict=True):
        if with_logprobs:
            assert frames.unpack_logprobs(row.logprobs) == tuple([-0.5] * len(tokens))


@given(st.binary(max_size=400))
def test_any_bytes_give_rows_or_a_frame_error(data: bytes) -> None:
    """A hostile frame never raises anything but FrameError, and rows never disagree with their counts."""
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


def _submit() -> pb.Submit:
    submit = pb.Submit(
        slot=1,
        request_id="0" * 32,
        attempt=1,
        token_ids=frames.pack_ids(range(5)),
        block_tokens=2,
        block_hashes=b"h" * 16,
    )
    submit.budget.remaining_ms = 1000
    submit.sampling.top_p = 1.0
    return submit


def test_a_sound_submit_passes() -> None:
    """The submit the other cases are made from is fine."""
    frames.check_submit(_submit(), last_slot=0)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("slot", 0, "slot is 0"),
        ("request_id", "x", "request_id"),
        ("request_id", "A" * 32, "request_id"),
        ("attempt", 0, "attempt is 0"),
        ("attempt", 70_000, "attempt is 70000"),
        ("token_ids", b"", "token_ids has 0 bytes"),
        ("token_ids", b"12345", "token_ids has 5 bytes"),
        ("start_position", 5, "start_position is 5"),
        ("block_tokens", 0, "block_tokens is 0"),
        ("block_hashes", b"h" * 8, "block_hashes has 8 bytes"),
    ],
)
def test_a_submit_that_breaks_the_protocol_is_named(field: str, value: object, words: str) -> None:
    """Each broken field is refused with its name and value."""
    submit = _submit()
    setattr(submit, field, value)
    with pytest.raises(frames.FrameError, match=words):
        frames.check_submit(submit, last_slot=0)


def test_a_slot_is_never_used_twice() -> None:
    """A slot at or below the last one of the stream breaks the protocol."""
    with pytest.raises(frames.FrameError, match="never used twice"):
        frames.check_submit(_submit(), last_slot=1)
