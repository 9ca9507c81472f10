"""Exceptions of a failed request: one class per action that the caller can take. Status codes are those of gRPC. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvmesh.errors import ErrorDetails
from kvmesh.inference.v1 import inference_pb2 as pb


class GenerateError(Exception):
    """A failed request. The tokens and the text received before the failure remain usable.

    Catch a subclass for one kind of failure, or this class for all.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        code: str = "",
        retry_after_s: float | None = None,
        violations: Mapping[str, str] | None = None,
        quota: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        """Stable name for programs, for example "QUEUE_FULL"."""
        self.message = message
        """One sentence for people."""
        self.code = code
        """Name of the gRPC status, for example "UNAVAILABLE"; empty if no frontend sent a status."""
        self.retry_after_s = retry_after_s
        """Seconds after which the mesh expects to have capacity; None if not reported."""
        self.violations = dict(violations or {})
        """Field of the request -> its fault; for RequestRefused."""
        self.quota = dict(quota or {})
        """Scope -> the limit that was exceeded; for QuotaExceeded."""
        self.ids: list[int] = []
        """Tokens received before the failure, from position 0."""
        self.text = ""
        """Text of `ids`."""
        self.resume: pb.Resume | None = None
        """Value of `options.resume` that continues the same request after `ids`; None if the request never started."""


class RequestRefused(GenerateError):
    """The request is invalid; a retry does not help. `violations` names the fields."""


class MeshFull(GenerateError):
    """The mesh has no capacity now and sheds load. Retry after `retry_after_s`, or send less."""


class QuotaExceeded(MeshFull):
    """A limit of the tenant, of its key or of its organisation is used up for now; `quota` names the limit.

    Another frontend enforces the same limit. After `retry_after_s` the budget has grown enough.
    """


class MeshUnavailable(GenerateError):
    """No frontend could serve the request within the attempts of the retry policy. Try again later."""


class DeadlinePassed(GenerateError):
    """The request's deadline or TTFT timeout has passed."""

    last_reason = ""
    """Reason of the failure that was being retried at the deadline, for example "NO_ROUTER".
    Empty if no retry was under way, or if tokens have arrived since."""
    last_message = ""
    """Sentence of that failure."""

    @classmethod
    def after(
        cls,
        reason: str,
        message: str,
        last_reason: str,
        last_message: str,
        retry_after_s: float | None = None,
    ) -> DeadlinePassed:
        """Return the error of a request with an earlier attempt that ended with `last_reason`; empty: no such attempt."""
        if last_reason:
            message += f"; the last attempt ended with {last_reason}: {last_message}"
        error = cls(reason, message, code="DEADLINE_EXCEEDED", retry_after_s=retry_after_s)
        error.last_reason, error.last_message = last_reason, last_message
        return error


class Superseded(GenerateError):
    """A later call sent the same idempotency key or resume token and continues the request."""


class MeshFault(GenerateError):
    """A bug in the mesh or in an engine ended the request; the log of the frontend has the cause."""


class ProtocolBroken(GenerateError):
    """The stream repeated or skipped a position. This is a bug, and the client does not hide it."""


QUOTA: Final = frozenset({"REQUEST_RATE_EXCEEDED", "TOKEN_RATE_EXCEEDED", "CONCURRENCY_EXCEEDED"})
"""Reasons of refusals by the caller's own limits."""

_BY_CODE: Final[Mapping[str, type[GenerateError]]] = {
    "INVALID_ARGUMENT": RequestRefused,
    "ALREADY_EXISTS": RequestRefused,
    "UNAUTHENTICATED": RequestRefused,
    "PERMISSION_DENIED": RequestRefused,
    "UNIMPLEMENTED": RequestRefused,
    "RESOURCE_EXHAUSTED": MeshFull,
    "DEADLINE_EXCEEDED": DeadlinePassed,
    "ABORTED": Superseded,
    "INTERNAL": MeshFault,
}


def error_of(details: ErrorDetails) -> GenerateError:
    """Return the exception for a call that ended with `details`; an unexpected status is MeshUnavailable.

    The details' own text names the first violation. The exception's has all of them.
    """
    code = details.code.name
    no_frontend = "this address is no frontend of kvmesh: " if code == "UNIMPLEMENTED" else ""
    further = [f"{field} {fault}" for field, fault in list(details.violations.items())[1:]]
    message = "; ".join([f"{no_frontend}{details.message}", *further])
    kind = QuotaExceeded if details.reason in QUOTA else _BY_CODE.get(code, MeshUnavailable)
    return kind(
        details.reason or code,
        message,
        code=code,
        retry_after_s=details.retry_after_s,
        violations=details.violations,
        quota=details.quota,
    )
