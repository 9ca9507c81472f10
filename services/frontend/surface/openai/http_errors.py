"""Errors of the mesh as HTTP responses in OpenAI's form: status, headers, body. No I/O here.

`error.code` is the reason in docs/errors.md. `x-should-retry` overrides the retries of the openai package where the mesh
knows better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import grpc
import msgspec

from kvmesh.errors import MeshError

_STATUS: Final[Mapping[grpc.StatusCode, int]] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 503,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.CANCELLED: 499,
}
"""Status by gRPC status; 500 for all others."""

_STATUS_OF_REASON: Final[Mapping[str, int]] = {
    "MESSAGE_TOO_LARGE": 413,
    "REQUEST_TIMEOUT": 408,
    "REQUEST_RATE_EXCEEDED": 429,
    "TOKEN_RATE_EXCEEDED": 429,
    "CONCURRENCY_EXCEEDED": 429,
}
"""Status by reason, where it differs from that of its gRPC status. 429 are limits of the tenant, 503 those of the mesh."""

_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "cancelled_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

SDK_RETRY_S_MAX: Final = 60.0
"""Longest Retry-After that the openai package obeys. It would retry earlier after a longer one."""


def status_of(error: MeshError) -> int:
    """Return the HTTP status of `error`."""
    return _STATUS_OF_REASON.get(error.reason) or _STATUS.get(error.code, 500)


def headers_of(error: MeshError) -> list[tuple[bytes, bytes]]:
    """Return the headers of the response beside those of its body."""
    after_s = error.retry_after_s
    made = [(b"x-should-retry", b"true" if _should_retry(error) else b"false")]
    if after_s is not None:
        made.append((b"retry-after", b"%d" % math.ceil(after_s)))
        made.append((b"retry-after-ms", b"%d" % math.ceil(after_s * 1000)))
    if error.code is grpc.StatusCode.UNAUTHENTICATED:
        made.append((b"www-authenticate", b"Bearer"))
    return made


def body_of(error: MeshError) -> bytes:
    """Return the JSON body of `error`."""
    return msgspec.json.encode({"error": fields_of(error)})


def event_of(error: MeshError) -> bytes:
    """Return `error` as a server-sent event: the last one of a stream that began well."""
    fields = fields_of(error)
    fields["should_retry"] = _should_retry(error)
    if error.retry_after_s is not None:
        fields["retry_after_ms"] = math.ceil(error.retry_after_s * 1000)
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode({"error": fields})


def fields_of(error: MeshError) -> dict[str, Any]:
    """Return the fields of `error`. `param` is the first wrong field; `violations` has all of them."""
    status = status_of(error)
    fields: dict[str, Any] = {
        "message": error.message,
        "type": _TYPES.get(status, "server_error"),
        "param": error.violations[0].field if error.violations else None,
        "code": error.reason,
    }
    if len(error.violations) > 1:
        fields["violations"] = [
            {"param": each.field, "message": each.description} for each in error.violations
        ]
    if error.quota:
        fields["quota"] = [{"subject": each.subject, "message": each.description} for each in error.quota]
    return fields


def plain(status: int, message: str, code: str) -> bytes:
    """Return the JSON body of an error of HTTP itself, for example an unknown path."""
    kind = _TYPES.get(status, "server_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})


def _should_retry(error: MeshError) -> bool:
    """Return True if the openai package should retry: the mesh names a time, and the package would keep to it.

    The mesh itself has retried faults already, so a fault without a time is final.
    """
    return error.retry_after_s is not None and error.retry_after_s <= SDK_RETRY_S_MAX
