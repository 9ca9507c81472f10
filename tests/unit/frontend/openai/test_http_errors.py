"""Errors over HTTP: each reason has a status, and the headers say whether to retry."""

from __future__ import annotations

import json

import grpc
import pytest

from kvmesh.buckets.limits import Account, Limit, Scope
from kvmesh.errors import TABLE, MeshError, QuotaViolation, Violation, invalid
from services.frontend.surface.openai import http_errors, rate_limits

LIMITS_OF_TENANTS = {"REQUEST_RATE_EXCEEDED", "TOKEN_RATE_EXCEEDED", "CONCURRENCY_EXCEEDED"}


@pytest.mark.parametrize("reason", sorted(TABLE))
def test_each_reason_has_a_status_of_its_kind(reason: str) -> None:
    status, code = http_errors.status_of(MeshError(reason, "text")), TABLE[reason]
    if reason in LIMITS_OF_TENANTS:
        assert status == 429
    elif code is grpc.StatusCode.INTERNAL:
        assert status == 500
    elif code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE):
        assert status == 503
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
        assert status in {504, 408}
    else:
        assert 400 <= status < 500


def test_an_unknown_model_is_not_found() -> None:
    assert http_errors.status_of(MeshError("MODEL_UNKNOWN", "text")) == 404
    wrong = invalid("FIELD_OUT_OF_RANGE", [Violation("model", "of type int", "str")])
    assert http_errors.status_of(wrong) == 400


def test_the_body_has_code_and_parameter() -> None:
    wrong = [Violation("a", "1", "2"), Violation("b", "3", "4")]
    fields = json.loads(http_errors.body_of(invalid("FIELD_OUT_OF_RANGE", wrong)))["error"]
    assert fields["code"] == "FIELD_OUT_OF_RANGE" and fields["param"] == "a"
    assert fields["type"] == "invalid_request_error"
    assert [each["param"] for each in fields["violations"]] == ["a", "b"]
    quota = MeshError("TOKEN_RATE_EXCEEDED", "t", quota=[QuotaViolation("tenant:x", "too much")])
    assert json.loads(http_errors.body_of(quota))["error"]["quota"][0]["subject"] == "tenant:x"


@pytest.mark.parametrize(
    ("after_s", "retries", "seconds"), [(0.2, b"true", b"1"), (59.5, b"true", b"60"), (61.0, b"false", b"61")]
)
def test_a_time_says_when_to_retry(after_s: float, retries: bytes, seconds: bytes) -> None:
    """The openai package would ignore a longer time, and retry too early."""
    made = dict(http_errors.headers_of(MeshError("QUEUE_FULL", "full", retry_after_s=after_s)))
    assert made[b"x-should-retry"] == retries
    assert made[b"retry-after"] == seconds
    assert made[b"retry-after-ms"] == b"%d" % round(after_s * 1000)


def test_an_error_without_a_time_is_final() -> None:
    made = dict(http_errors.headers_of(MeshError("ENGINE_ERROR", "text")))
    assert made == {b"x-should-retry": b"false"}
    unauthenticated = dict(http_errors.headers_of(MeshError("CREDENTIALS_MISSING", "text")))
    assert unauthenticated[b"www-authenticate"] == b"Bearer"


def test_an_error_in_a_stream_is_an_event() -> None:
    error = MeshError("DRAINING", "it drains", retry_after_s=0.5)
    kind, data = http_errors.event_of(error).decode().removesuffix("\n\n").split("\n")
    assert kind == "event: error"
    fields = json.loads(data.removeprefix("data: "))["error"]
    assert (fields["code"], fields["should_retry"], fields["retry_after_ms"]) == ("DRAINING", True, 500)


def test_rate_limits_are_those_of_the_tightest_bucket() -> None:
    scopes = (
        Scope("organisation:o", Limit(requests_per_min=600, requests_burst=100)),
        Scope(
            "tenant:t", Limit(requests_per_min=60, requests_burst=10, tokens_per_min=6000, tokens_burst=500)
        ),
    )
    given = {
        "kvmesh-remaining-requests": "4",
        "kvmesh-remaining-tokens": "500",
        "kvmesh-remaining-concurrency": "1",
    }
    made = dict(rate_limits.headers(given, Account("o", scopes)))
    assert made == {
        b"x-ratelimit-remaining-requests": b"4",
        b"x-ratelimit-limit-requests": b"10",
        b"x-ratelimit-reset-requests": b"6.000s",
        b"x-ratelimit-remaining-tokens": b"500",
        b"x-ratelimit-limit-tokens": b"500",
        b"x-ratelimit-reset-tokens": b"0.000s",
    }
    assert rate_limits.headers({}, Account("o", scopes)) == []
    assert rate_limits.headers(given, None) == []
