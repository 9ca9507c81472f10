"""How a request can fail for its caller: one exception per thing that the caller can do about it.

Pure in what it decides; the status codes are gRPC's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvmesh.errors import ErrorDetails
from kvmesh.inference.v1 import inference_pb2 as pb


class GenerateError(Exception):
    """A request that did not end well. What was received until then stays usable.

    Catch a subclass to act on one kind, or this one for all.
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
        """Name of the gRPC status, for example "UNAVAILABLE"; empty if no frontend said one."""
        self.retry_after_s = retry_after_s
        """Seconds after which the mesh expects to have room; None: it did not say."""
        self.violations = dict(violations or {})
        """What is wrong, by field of the request; for RequestRefused."""
        self.quota = dict(quota or {})
        """Which limits were met, by whose they are; for QuotaExceeded."""
        self.ids: list[int] = []
        """Tokens received before the failure, from position 0."""
        self.text = ""
        """Their text."""
        self.resume: pb.Resume | None = None
        """What goes on behind `ids`, put into `options.resume` of the same request; None: nothing was started."""


class RequestRefused(GenerateError):
    """The request is wrong; sending it again does not help. `violations` names the fields."""


class MeshFull(GenerateError):
    """The mesh has no room now. Try again after `retry_after_s`, or send less."""


class QuotaExceeded(MeshFull):
    """The tenant, its key or its organisation has used what it may for now; `quota` names the limit.

    There may be room for others: trying elsewhere does not help, and `retry_after_s` is when its own budget has grown.
    """


class MeshUnavailable(GenerateError):
    """Nobody could serve the request, and the client has tried as often as it may. Try again later."""


class DeadlinePassed(GenerateError):
    """The request's time is over."""

    last_reason = ""
    """Reason of the failure behind which the request was being sent again when its time ended, for example "NO_ROUTER";
    empty if it was not, or tokens have come since."""
    last_message = ""
    """The sentence of that failure."""

    @classmethod
    def after(
        cls,
        reason: str,
        message: str,
        last_reason: str,
        last_message: str,
        retry_after_s: float | None = None,
    ) -> DeadlinePassed:
        """Return the error of a request whose last attempt before ended with `last_reason`; empty: there was none."""
        if last_reason:
            message += f"; the last attempt ended with {last_reason}: {last_message}"
        error = cls(reason, message, code="DEADLINE_EXCEEDED", retry_after_s=retry_after_s)
        error.last_reason, error.last_message = last_reason, last_message
        return error


class Superseded(GenerateError):
    """Somebody else sent the same idempotency key or resume token later: the request goes on there."""


class MeshFault(GenerateError):
    """A bug in the mesh or in an engine ended the request; the log of the frontend has the cause."""


class ProtocolBroken(GenerateError):
    """The stream repeated or left out a position: a bug that the client will not hide."""


QUOTA: Final = frozenset({"REQUEST_RATE_EXCEEDED", "TOKEN_RATE_EXCEEDED", "CONCURRENCY_EXCEEDED"})
"""Refusals by the caller's own limits."""

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
    """Return the exception for a call that ended with `details`; a status nobody expects is MeshUnavailable."""
    code = details.code.name
    kind = QuotaExceeded if details.reason in QUOTA else _BY_CODE.get(code, MeshUnavailable)
    return kind(
        details.reason or code,
        details.message,
        code=code,
        retry_after_s=details.retry_after_s,
        violations=details.violations,
        quota=details.quota,
    )
