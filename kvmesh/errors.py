"""Errors that a caller can see: one table from reason to gRPC status, with the google.rpc details.

A `MeshError` is a refusal or a translated fault. Any other exception of a handler is a bug. It becomes INTERNAL, and its
text stays in the log.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import grpc
from google.rpc import error_details_pb2, status_pb2

from kvmesh import error_details
from kvmesh.error_details import MESSAGE_BYTES_MAX, shortened

DOMAIN: Final = "kvmesh"
"""ErrorInfo.domain of every error of the mesh."""

TABLE: Final[Mapping[str, grpc.StatusCode]] = {
    # The request is wrong. A retry does not help.
    "FIELD_OUT_OF_RANGE": grpc.StatusCode.INVALID_ARGUMENT,
    "FIELD_UNKNOWN": grpc.StatusCode.INVALID_ARGUMENT,
    "INVALID_UTF8": grpc.StatusCode.INVALID_ARGUMENT,
    "MESSAGE_MALFORMED": grpc.StatusCode.INVALID_ARGUMENT,
    "MESSAGE_TOO_LARGE": grpc.StatusCode.INVALID_ARGUMENT,
    "PROMPT_TOO_LONG": grpc.StatusCode.INVALID_ARGUMENT,
    "TEMPLATE_REFUSED": grpc.StatusCode.INVALID_ARGUMENT,
    "FEATURE_UNSUPPORTED": grpc.StatusCode.INVALID_ARGUMENT,
    "RESUME_TOKEN_INVALID": grpc.StatusCode.INVALID_ARGUMENT,
    "ENGINE_REFUSED": grpc.StatusCode.INVALID_ARGUMENT,
    "IDEMPOTENCY_KEY_REUSED": grpc.StatusCode.INVALID_ARGUMENT,
    "COST_EXCEEDS_BURST": grpc.StatusCode.INVALID_ARGUMENT,
    "MODEL_UNKNOWN": grpc.StatusCode.NOT_FOUND,
    # The caller is unknown, or lacks the right for this request.
    "CREDENTIALS_MISSING": grpc.StatusCode.UNAUTHENTICATED,
    "CREDENTIALS_UNKNOWN": grpc.StatusCode.UNAUTHENTICATED,
    "TENANT_DISABLED": grpc.StatusCode.PERMISSION_DENIED,
    "TENANT_UNKNOWN": grpc.StatusCode.PERMISSION_DENIED,
    # The tenant, its key or its organisation has no budget left for now. A retry at another frontend does not help.
    "REQUEST_RATE_EXCEEDED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "TOKEN_RATE_EXCEEDED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "CONCURRENCY_EXCEEDED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    # The request has ended well, and its executions after that have reached their limit.
    "ALREADY_FINISHED": grpc.StatusCode.ALREADY_EXISTS,
    # The mesh has no capacity now (admission control, load shedding). A later retry may succeed.
    "CALLS_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "LIVE_REQUESTS_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "QUEUE_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "QUEUE_TIMEOUT": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "KV_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "SHED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "SLOW_READER": grpc.StatusCode.RESOURCE_EXHAUSTED,
    # No process can serve the request now.
    "DRAINING": grpc.StatusCode.UNAVAILABLE,
    "NO_ROUTER": grpc.StatusCode.UNAVAILABLE,
    "NO_REPLICA": grpc.StatusCode.UNAVAILABLE,
    "REGION_UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "STALE_SNAPSHOT": grpc.StatusCode.UNAVAILABLE,
    "RETRY_BUDGET_EXHAUSTED": grpc.StatusCode.UNAVAILABLE,
    "ATTEMPTS_EXHAUSTED": grpc.StatusCode.UNAVAILABLE,
    "BUDGET_UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    # A time limit has passed.
    "DEADLINE": grpc.StatusCode.DEADLINE_EXCEEDED,
    "REQUEST_TIMEOUT": grpc.StatusCode.DEADLINE_EXCEEDED,
    "TTFT_TIMEOUT": grpc.StatusCode.DEADLINE_EXCEEDED,
    "INFEASIBLE_DEADLINE": grpc.StatusCode.DEADLINE_EXCEEDED,
    # The request cannot continue with the same output behind the client's last event (HTTP).
    "RESUME_NOT_EXACT": grpc.StatusCode.FAILED_PRECONDITION,
    # The request continues at another frontend: a client resumed it while this stream was open.
    "SUPERSEDED": grpc.StatusCode.ABORTED,
    # The caller's certificate is for another role, or another mesh.
    "PEER_REFUSED": grpc.StatusCode.PERMISSION_DENIED,
    # Commands at the control plane.
    "NOT_LEADER": grpc.StatusCode.FAILED_PRECONDITION,
    "CHANGE_REFUSED": grpc.StatusCode.FAILED_PRECONDITION,
    "NAME_UNKNOWN": grpc.StatusCode.INVALID_ARGUMENT,
    "NO_ROLLOUT": grpc.StatusCode.NOT_FOUND,
    "NO_SHADOW": grpc.StatusCode.NOT_FOUND,
    "STORE_UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    # The client has left, and does not read this status.
    "CLIENT_GONE": grpc.StatusCode.CANCELLED,
    # Bugs, in the mesh or in an engine.
    "ENGINE_ERROR": grpc.StatusCode.INTERNAL,
    "INTERNAL": grpc.StatusCode.INTERNAL,
}
"""Status code by reason. Reasons are stable and UPPER_SNAKE."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One invalid field: its path, its value, and the allowed range."""

    field: str
    """Path in the request, for example "sampling.temperature"."""
    value: str
    """The value that was sent, shortened. Never a whole prompt."""
    allowed: str
    """The range, for example "0 to 10"."""
    is_clause: bool = False
    """True: `allowed` is a clause of its own, for example "each step must be above the step before it"."""

    @property
    def description(self) -> str:
        """One sentence with value and range."""
        return f"is {self.value}; {self.allowed}{'' if self.is_clause else ' is allowed'}"


class QuotaViolation(NamedTuple):
    """One exceeded limit, with its subject."""

    subject: str
    """For example "tenant:search"."""
    description: str
    """One sentence with the limit, for example "60000 tokens per minute are used"."""


@dataclass(eq=False)
class MeshError(Exception):
    """An error with a reason of the table. The client sees `message`, so it has no internals."""

    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The variable parts of the message, for programs."""
    retry_after_s: float | None = None
    """Seconds after which a retry makes sense. None: unknown, or never."""
    violations: Sequence[Violation] = ()
    quota: Sequence[QuotaViolation] = ()
    trailers: Mapping[str, str] = field(default_factory=dict)
    """Trailing metadata beside the status, for example the remaining budget."""

    def __post_init__(self) -> None:
        assert self.reason in TABLE, f"{self.reason} is not in the table"

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status code."""
        return TABLE[self.reason]


def invalid(reason: str, violations: Sequence[Violation]) -> MeshError:
    """Return the error for invalid fields. The first one gives the text. `violations` is not empty."""
    first = violations[0]
    return MeshError(
        reason,
        f"{first.field} {first.description}",
        metadata={"field": first.field, "value": first.value, "allowed": first.allowed},
        violations=violations,
    )


def internal() -> MeshError:
    """Return the error that a client sees after a bug."""
    return MeshError("INTERNAL", "a bug in the mesh ended the request; its log has the cause")


def to_bytes(error: MeshError) -> bytes:
    """Return `error` as an encoded google.rpc.Status with its details, at most 1 KiB."""
    return error_details.status(
        _NUMBERS[error.reason],
        error.message,
        error.reason,
        DOMAIN,
        error.metadata,
        error.retry_after_s,
        tuple([(each.field, each.description) for each in error.violations]) if error.violations else (),
        tuple(error.quota),
    )


def to_status(error: MeshError) -> grpc.Status:
    """Return `error` with its trailers for `context.abort_with_status`."""
    trailers: list[tuple[str, str | bytes]] = [(DETAILS_KEY, to_bytes(error)), *error.trailers.items()]
    if error.retry_after_s is not None:
        trailers.append((PUSHBACK_KEY, str(math.ceil(error.retry_after_s * 1000))))
    return _Status(error.code, shortened(error.message, MESSAGE_BYTES_MAX), tuple(trailers))


_NUMBERS: Final[Mapping[str, int]] = {reason: code.value[0] for reason, code in TABLE.items()}


class _Fields(NamedTuple):
    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


class _Status(_Fields, grpc.Status):
    """A grpc.Status."""


DETAILS_KEY: Final = "grpc-status-details-bin"

PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"
"""Trailer with the pushback for gRPC's own retries (gRFC A6)."""

MAX_VIOLATIONS: Final = error_details.VIOLATIONS_MAX
"""Most violations that an error carries. Validation may stop there."""


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """Details of a failed call, as a client reads them."""

    code: grpc.StatusCode
    message: str
    reason: str
    metadata: Mapping[str, str]
    retry_after_s: float | None
    violations: Mapping[str, str]
    """Description by field."""
    quota: Mapping[str, str] = field(default_factory=dict)
    """Description by subject."""
    trailers: Mapping[str, str] = field(default_factory=dict)
    """The texts in the trailing metadata, for example the remaining budget."""


def from_rpc_error(error: grpc.aio.AioRpcError) -> ErrorDetails:
    """Return the details of a call that a server of the mesh ended. `reason` is empty without details."""
    reason, metadata, retry_after_s = "", dict[str, str](), None
    violations: dict[str, str] = {}
    quota: dict[str, str] = {}
    found: Any = error.trailing_metadata() or ()  # the stubs leave its items opaque
    trailers = {key: value for key, value in found if isinstance(value, str)}
    for key, value in found:
        if key != DETAILS_KEY:
            continue
        status = status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode("latin-1"))
        for detail in status.details:
            info, retry, bad, failure = (
                error_details_pb2.ErrorInfo(),
                error_details_pb2.RetryInfo(),
                error_details_pb2.BadRequest(),
                error_details_pb2.QuotaFailure(),
            )
            if detail.Unpack(info):
                reason, metadata = info.reason, dict(info.metadata)
            elif detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
            elif detail.Unpack(bad):
                violations = {each.field: each.description for each in bad.field_violations}
            elif detail.Unpack(failure):
                quota = {each.subject: each.description for each in failure.violations}
    return ErrorDetails(
        error.code(), error.details() or "", reason, metadata, retry_after_s, violations, quota, trailers
    )
