"""Batches and snapshots survive encoding; any other bytes are refused with one typed error."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh import blocks
from kvmesh.prefix_index.events import (
    Batch,
    EventError,
    Op,
    Snapshot,
    decode_batch,
    decode_snapshot_head,
    encode_batch,
    encode_snapshot,
    encode_snapshot_head,
    format_stream_id,
    parse_stream_id,
)

U64 = st.integers(0, 2**64 - 1)
NAMES = st.text(min_size=1, max_size=40)
HASHES = st.lists(U64, max_size=40).map(tuple)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    after = draw(st.integers(0, 2**63))
    op = draw(st.sampled_from(Op))
    if op is Op.SNAPSHOT:
        seq = after + draw(st.integers(0, 9))
        return Batch(draw(NAMES), draw(NAMES), after, seq, op, (), draw(st.integers(0, 2**32 - 1)))
    return Batch(draw(NAMES), draw(NAMES), after, after + draw(st.integers(1, 9)), op, draw(HASHES))


@given(batches())
def test_a_batch_survives_encoding(batch: Batch) -> None:
    """Every field survives encoding."""
    assert decode_batch(encode_batch(batch)) == batch


@given(NAMES, NAMES, U64, st.tuples(U64, U64), HASHES, st.integers(1, 7))
def test_a_snapshot_survives_encoding(
    replica: str, epoch: str, seq: int, stream_id: tuple[int, int], hashes: tuple[int, ...], size: int
) -> None:
    """Every field survives, and chunks give all hashes in order."""
    snapshot = Snapshot(replica, epoch, seq, stream_id, blocks.pack(hashes))
    data = encode_snapshot(snapshot)
    head = decode_snapshot_head(data)
    assert head == snapshot.head and head[:4] == snapshot[:4]
    assert data[head.size :] == snapshot.packed
    assert tuple(value for chunk in snapshot.chunks(size) for value in chunk) == hashes


@given(st.data())
def test_damaged_bytes_are_a_value_or_a_typed_error(data: st.DataObject) -> None:
    """Cut, flipped and foreign bytes raise only EventError."""
    whole = encode_batch(data.draw(batches()))
    if data.draw(st.booleans()):
        whole = encode_snapshot(Snapshot("r", "e", 5, (1, 2), blocks.pack((1, 2, 3))))
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    tail = data.draw(st.binary(max_size=8))
    for raw in (cut, cut + tail, bytes(damaged), tail):
        for decode in (decode_batch, decode_snapshot_head):
            try:
                value = decode(raw)
            except EventError as error:
                assert str(error)
            else:
                if isinstance(value, Batch):
                    assert encode_batch(value) == raw
                else:
                    assert encode_snapshot_head(*value[:5]) == raw[: value.size]


@given(st.binary(max_size=50))
def test_any_stream_id_is_two_numbers_or_an_error(raw: bytes) -> None:
    """Redis's ids are read strictly."""
    with contextlib.suppress(EventError):
        assert parse_stream_id(format_stream_id(parse_stream_id(raw)).encode()) == parse_stream_id(raw)


def test_unencodable_values_are_refused() -> None:
    """Numbers and texts outside their range raise before anything is sent."""
    for batch in (
        Batch("", "e", 0, 1, Op.STORED, ()),
        Batch("r" * 256, "e", 0, 1, Op.STORED, ()),
        Batch("r", "e", 0, 2**64, Op.STORED, ()),
        Batch("r", "e", 0, 1, Op.STORED, (2**64,)),
        Batch("r", "e", 0, 1, Op.STORED, (-1,)),
    ):
        with pytest.raises(EventError):
            encode_batch(batch)
