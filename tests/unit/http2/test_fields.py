"""Header fields of gRPC, as PROTOCOL-HTTP2.md has them."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.http2.fields import (
    NotACall,
    call_fields,
    fields_of,
    metadata_of,
    parse_timeout,
    status_fields,
    status_of,
)
from kvmesh.http2.messages import WireError

REQUEST = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a/B"),
    (b"content-type", b"application/grpc"),
]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"1H", 3600),
        (b"2M", 120),
        (b"3S", 3),
        (b"4m", 0.004),
        (b"5u", 5e-6),
        (b"6n", 6e-9),
        (b"99999999S", 99999999),
    ],
)
def test_timeouts(value: bytes, seconds: float) -> None:
    assert parse_timeout(value) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "value", [b"", b"S", b"1", b"-1S", b"1s", b"999999999S", b"1.5S", b"1 S", b"\xff", "١S".encode()]
)
def test_timeouts_out_of_range_are_named(value: bytes) -> None:
    with pytest.raises(WireError, match="grpc-timeout") as caught:
        parse_timeout(value)
    assert caught.value.code is grpc.StatusCode.INTERNAL


@given(st.text())
def test_a_status_message_survives_the_wire_as_printable_ascii(text: str) -> None:
    fields = status_fields(grpc.StatusCode.NOT_FOUND, text, ())
    assert all(0x20 <= byte < 0x7F for _, value in fields for byte in value)
    assert status_of(fields) == (grpc.StatusCode.NOT_FOUND, text.encode("utf-8", "replace").decode())


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True).filter(lambda key: key != "te"),
            st.binary(max_size=20),
        ),
        max_size=6,
    )
)
def test_metadata_survives_the_wire_in_order(pairs: list[tuple[str, bytes]]) -> None:
    """Binary values under "-bin" keys, as they are; the fields of the transport are left out."""
    metadata = tuple((f"{key}-bin", value) for key, value in pairs)
    assert metadata_of([*REQUEST, *fields_of(metadata)]) == metadata


def test_text_metadata_and_joined_binary_values() -> None:
    fields = [
        (b"kvmesh-tenant", b"search"),
        (b"raw", b"\xff"),
        (b"a-bin", b"AQ==,Ag"),
        (b"grpc-timeout", b"1S"),
    ]
    assert metadata_of(fields) == (
        ("kvmesh-tenant", "search"),
        ("raw", b"\xff"),
        ("a-bin", b"\1"),
        ("a-bin", b"\2"),
    )
    with pytest.raises(WireError, match="metadata a-bin"):
        metadata_of([(b"a-bin", b"*")])


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ((b":method", b"GET"), 405),
        ((b"content-type", b"text/html"), 415),
        ((b"content-type", b"application/grpc-web"), 415),
        ((b"content-type", b""), 415),
    ],
)
def test_requests_that_are_no_calls(changed: tuple[bytes, bytes], status: int) -> None:
    with pytest.raises(NotACall) as caught:
        call_fields([changed if field[0] == changed[0] else field for field in REQUEST])
    assert caught.value.http_status == status


@pytest.mark.parametrize(
    "content", [b"application/grpc", b"application/grpc+proto", b"application/grpc;charset=utf-8"]
)
def test_content_types_of_grpc(content: bytes) -> None:
    read = call_fields(
        [*REQUEST[:3], (b"content-type", content), (b"grpc-encoding", b"gzip"), (b"grpc-timeout", b"2S")]
    )
    assert read == (b"/a/B", 2.0, "gzip")


def test_an_unknown_compression_names_those_that_are_known() -> None:
    with pytest.raises(WireError, match="'snappy': allowed are identity, deflate, gzip") as caught:
        call_fields([*REQUEST, (b"grpc-encoding", b"snappy")])
    assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
