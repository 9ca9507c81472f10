"""Errors: one table, and details that a client can read."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.unknown_fields import UnknownFieldSet
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from kvmesh import errors
from kvmesh.error_details import STATUS_BYTES_MAX
from kvmesh.errors import TABLE, MeshError, QuotaViolation, Violation, invalid


def rpc_error(error: MeshError) -> grpc.aio.AioRpcError:
    """Return the details of `error` that a client sees."""
    status = errors.to_status(error)
    trailers = grpc.aio.Metadata(*((key, value) for key, value in status.trailing_metadata))
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailers, status.details, None)


@pytest.mark.parametrize("reason", TABLE)
def test_every_reason_is_upper_snake_and_survives_the_wire(reason: str) -> None:
    """Programs match on the reason, so it must arrive as it is in the table."""
    assert reason == reason.upper() and reason.replace("_", "").isalnum()
    read = errors.from_rpc_error(rpc_error(MeshError(reason, "because", {"key": "value"}, 0.25)))
    assert (read.code, read.reason, read.message) == (TABLE[reason], reason, "because")
    assert read.metadata == {"key": "value"}
    assert read.retry_after_s == 0.25


def test_a_violation_names_field_value_and_range() -> None:
    """The first violation gives the text. All of them are details."""
    error = invalid("FIELD_OUT_OF_RANGE", [Violation("a.b", "-1", "0 to 9"), Violation("c", "7", "8 to 9")])
    assert error.message == "a.b is -1; 0 to 9 is allowed"
    assert error.metadata == {"field": "a.b", "value": "-1", "allowed": "0 to 9"}
    read = errors.from_rpc_error(rpc_error(error))
    assert read.violations == {"a.b": "is -1; 0 to 9 is allowed", "c": "is 7; 8 to 9 is allowed"}
    assert read.retry_after_s is None


def test_an_unknown_reason_is_a_bug_here() -> None:
    """A reason outside the table is refused."""
    with pytest.raises(AssertionError):
        MeshError("SOMETHING_ELSE", "x")


@pytest.mark.parametrize("width", [1, 100, 3000])
def test_details_stay_small_with_any_number_of_violations(width: int) -> None:
    """Proxies cut trailers. A thousand wrong fields with long values must still leave a valid status."""
    wrong = [Violation(f"field[{each}]", "ü" * width, "1") for each in range(1000)]
    error = invalid("FIELD_OUT_OF_RANGE", wrong)
    error.retry_after_s = 1.0
    error.quota = [QuotaViolation("tenant:" + "t" * width, "x" * width)] * 100
    data = errors.to_bytes(error)
    assert len(data) <= STATUS_BYTES_MAX
    message = status_pb2.Status.FromString(data).message
    assert errors.to_status(error).details == message, "gRPC's own reader compares them"
    read = errors.from_rpc_error(rpc_error(error))
    assert read.reason == "FIELD_OUT_OF_RANGE" and read.retry_after_s == 1.0
    assert "field[0]" in read.violations and read.metadata["field"] == "field[0]"


def test_a_refusal_carries_its_quota_and_its_trailers() -> None:
    """The details have the subject of the limit, the remaining budget, and the pushback for gRPC's own retries."""
    trailers = {"kvmesh-remaining-tokens": "7"}
    quota = [QuotaViolation("tenant:search", "600 tokens per minute are used")]
    error = MeshError("TOKEN_RATE_EXCEEDED", "wait", retry_after_s=0.2501, quota=quota, trailers=trailers)
    sent = dict(errors.to_status(error).trailing_metadata)
    assert sent["kvmesh-remaining-tokens"] == "7" and sent["grpc-retry-pushback-ms"] == "251"
    assert errors.from_rpc_error(rpc_error(error)).quota == {quota[0].subject: quota[0].description}
    assert "grpc-retry-pushback-ms" not in dict(errors.to_status(errors.internal()).trailing_metadata)


def test_a_foreign_error_has_no_reason() -> None:
    """A status without details of the mesh keeps its code and text."""
    read = errors.from_rpc_error(
        grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "gone", None
        )
    )
    assert (read.code, read.reason, read.message) == (grpc.StatusCode.UNAVAILABLE, "", "gone")


def test_error_info_carries_the_domain() -> None:
    """A reason belongs to the mesh only under the domain `kvmesh`."""
    info = error_details_pb2.ErrorInfo()
    assert status_pb2.Status.FromString(errors.to_bytes(errors.internal())).details[0].Unpack(info)
    assert info.domain == "kvmesh"


@given(
    st.sampled_from(sorted(TABLE)),
    st.text(max_size=60),
    st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=4),
    st.none() | st.floats(0, 1e5),
    st.lists(st.tuples(st.text(max_size=20), st.text(max_size=20)), max_size=3),
)
def test_the_bytes_equal_those_of_the_generated_classes(
    reason: str,
    message: str,
    metadata: dict[str, str],
    retry_after_s: float | None,
    pairs: list[tuple[str, str]],
) -> None:
    """They are encoded by hand for speed, and every gRPC client can read them."""
    quota = [QuotaViolation(*pair) for pair in pairs]
    data = errors.to_bytes(MeshError(reason, message, metadata, retry_after_s, quota=quota))
    status = status_pb2.Status.FromString(data)
    details: dict[str, Any] = {}
    for each in status.details:
        kind = getattr(error_details_pb2, each.TypeName().rpartition(".")[2])
        details[kind.DESCRIPTOR.name] = kind.FromString(each.value)
        assert not UnknownFieldSet(details[kind.DESCRIPTOR.name])
    assert (status.code, status.message) == (TABLE[reason].value[0], message)
    assert (details["ErrorInfo"].reason, details["ErrorInfo"].domain) == (reason, "kvmesh")
    assert dict(details["ErrorInfo"].metadata) == metadata
    if retry_after_s is not None:
        told = details["RetryInfo"].retry_delay
        assert told.seconds + told.nanos / 1e9 == pytest.approx(retry_after_s, abs=1e-6)
        assert 0 <= told.nanos < 1_000_000_000
    found = details["QuotaFailure"].violations if pairs else ()
    assert [(each.subject, each.description) for each in found] == pairs
