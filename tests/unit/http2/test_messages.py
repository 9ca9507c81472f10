"""Messages are cut from a body as they were put in, however its bytes arrive; broken ones get a typed status."""

from __future__ import annotations

import gzip
import zlib

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.http2.messages import MessageReader, WireError, prefixed


def compressed(message: bytes, encoding: str, lost: int = 0) -> bytes:
    """Return a compressed message without the last `lost` of its bytes."""
    packed = gzip.compress(message) if encoding == "gzip" else zlib.compress(message)
    packed = packed[: len(packed) - lost]
    return b"\1" + len(packed).to_bytes(4, "big") + packed


@given(
    st.lists(st.tuples(st.binary(max_size=40), st.booleans()), max_size=8),
    st.sampled_from(("gzip", "deflate")),
    st.lists(st.integers(1, 30), min_size=1),
    st.booleans(),
)
def test_messages_come_out_as_they_went_in(
    messages: list[tuple[bytes, bool]], encoding: str, cuts: list[int], is_eager: bool
) -> None:
    """For each cut of the body, and whether the reader takes messages at once or at the end."""
    body = b"".join(
        compressed(message, encoding) if packed else prefixed(message) for message, packed in messages
    )
    reader, taken, at, turn = MessageReader(100, encoding), [], 0, 0
    while at < len(body):
        size = cuts[turn % len(cuts)]
        reader.feed(body[at : at + size])
        at, turn = at + size, turn + 1
        while is_eager and (message := reader.take()) is not None:
            taken.append(message)
    while (message := reader.take()) is not None:
        taken.append(message)
    assert taken == [message for message, _ in messages]
    assert len(reader) == 0
    assert reader.missing_bytes() == 5


@given(st.binary(max_size=60), st.integers(0, 64))
def test_missing_bytes_complete_the_prefix_and_then_the_message(message: bytes, known: int) -> None:
    body = prefixed(message)
    reader = MessageReader(100)
    reader.feed(body[:known])
    while (missing := reader.missing_bytes()) > 0:
        assert reader.take() is None
        reader.feed(body[known : known + missing])
        known += missing
    assert reader.take() == message


@pytest.mark.parametrize(
    ("body", "encoding", "code", "says"),
    [
        (
            b"\0" + (101).to_bytes(4, "big"),
            "identity",
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "101 bytes; at most 100",
        ),
        (b"\2\0\0\0\0", "identity", grpc.StatusCode.INTERNAL, "flag 2"),
        (b"\1\0\0\0\0", "identity", grpc.StatusCode.INTERNAL, "names no compression"),
        (b"\1\0\0\0\3abc", "gzip", grpc.StatusCode.INTERNAL, "decompressed as gzip"),
        (
            compressed(b"x" * 50, "deflate", lost=4),
            "deflate",
            grpc.StatusCode.INTERNAL,
            "cut",
        ),
        (
            compressed(b"x" * 101, "gzip"),
            "gzip",
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "more than 100, decompressed",
        ),
        (compressed(bytes(1 << 24), "gzip"), "gzip", grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
    ],
)
def test_broken_messages_name_what_is_wrong(
    body: bytes, encoding: str, code: grpc.StatusCode, says: str
) -> None:
    reader = MessageReader(100, encoding)
    reader.feed(body)
    with pytest.raises(WireError) as caught:
        reader.take()
    assert caught.value.code is code
    assert says in str(caught.value)
