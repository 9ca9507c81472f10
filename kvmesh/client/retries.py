"""Retry state of one request: decides whether a failed call is sent again, and after which backoff. Pure.

All sends of a request draw on these counts, whichever frontends and regions they go to: a request has one retry budget.

New tokens are progress, and they reset the counts of consecutive sends and refusals. The mesh keeps the execution of a
request that has tokens. Such a request therefore waits longer for a full mesh than one without tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvmesh.client.errors import (
    DeadlinePassed,
    GenerateError,
    MeshFull,
    MeshUnavailable,
    QuotaExceeded,
    RequestRefused,
    error_of,
)
from kvmesh.client.frontends import Cause
from kvmesh.client.retry_budget import RetryBudget
from kvmesh.client.retry_policy import RetryPolicy
from kvmesh.errors import ErrorDetails

TOO_LARGE: Final = "message larger than max"
"""Part of gRPC's text about a message above its limit."""

SENDS_TOTAL_MAX: Final = 256
"""Most sends of one request, progress or not: the range of the counter in resume tokens."""

SUPERSEDED_MAX: Final = 2
"""Most consecutive SUPERSEDED statuses that late sends of the same request may cause. More mean another reader."""

FULL_WAIT_S: Final = 30.0
"""A request with tokens waits this long for a full mesh: its execution is kept, and slots become free."""

TRANSPORT_STATUSES: Final = frozenset(
    {"UNAVAILABLE", "CANCELLED", "UNKNOWN", "INTERNAL", "ABORTED", "RESOURCE_EXHAUSTED"}
)
"""Statuses that gRPC itself makes, without a reason of the mesh, when a connection or a server is lost during a call."""

FRONTEND_REASONS: Final = frozenset({"DRAINING", "LIVE_REQUESTS_FULL"})
"""Reasons that concern one frontend only; the request may go to another frontend at once."""

DEADLINE_SLACK_S: Final = 0.25
"""A frontend ends a request at most this long before the caller's deadline, to have time for its answer."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Send the request again."""

    after_s: float
    """Backoff before the send."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Fail the request with `error`."""

    error: GenerateError


@dataclass(frozen=True, slots=True)
class RetryContext:
    """Retry context: the situation at the failure of a call."""

    token_count: int
    """Tokens received so far."""
    has_other: bool
    """True if the next send goes to another frontend, with a closed circuit."""
    now_s: float
    jitter: float
    """In [0, 1)."""


def frontends_fault(details: ErrorDetails) -> Cause | None:
    """Return the cause if a status means that its frontend is lost or refuses requests now; None otherwise."""
    if details.reason in FRONTEND_REASONS:
        return Cause.DRAINING if details.reason == "DRAINING" else Cause.FULL
    if not _is_lost(details):
        return None
    return Cause.LOST if details.code.name == "UNAVAILABLE" else Cause.BROKEN


class Retries:
    """Retry state of one request that may run from `began_s` to `deadline_s` and begins with `token_count` tokens.

    `has_own_key`: the client made the idempotency key, so no other request can supersede this one.
    `ttft_s`: TTFT timeout over all sends. None: the deadline alone counts.
    `budget`: the client's. None: the request has one of its own.
    """

    def __init__(
        self,
        retry_policy: RetryPolicy,
        deadline_s: float,
        token_count: int,
        *,
        has_own_key: bool,
        began_s: float = 0.0,
        ttft_s: float | None = None,
        budget: RetryBudget | None = None,
    ) -> None:
        self.sends = 0
        """Number of sends, counted by the caller."""
        self._retry_policy = retry_policy
        self._budget = budget or RetryBudget(retry_policy.retry_share)
        self._deadline_s = deadline_s
        self._given_s = deadline_s - began_s
        self._ttft_s = ttft_s if ttft_s is not None and ttft_s < self._given_s else None
        self._first_token_by_s = deadline_s if self._ttft_s is None else began_s + self._ttft_s
        self._has_own_key = has_own_key
        self._token_count = token_count
        """Tokens at the last failure."""
        self._streak = 0
        """Consecutive sends without a new token."""
        self._refusals = 0
        self._refused_since_s: float | None = None
        """Time of the first of these refusals."""
        self._superseded = 0
        """Consecutive superseded calls, with tokens or without."""
        self._last: GenerateError | None = None
        """The last failure that was retried."""

    def until_s(self, token_count: int) -> float:
        """Return the deadline of a request with `token_count` tokens; without tokens, the end of the TTFT timeout."""
        return self._deadline_s if token_count else self._first_token_by_s

    def deadline_passed(self, token_count: int) -> DeadlinePassed:
        """Return the error of a request past its deadline with `token_count` tokens."""
        last = self._last if token_count <= self._token_count else None
        return self._deadline_passed(
            token_count, *(last.reason, last.message) if last is not None else ("", "")
        )

    def _deadline_passed(self, token_count: int, last_reason: str, last_message: str) -> DeadlinePassed:
        reason, what, given_s = "DEADLINE", "the request did not end", self._given_s
        if self._ttft_s is not None and not token_count:
            reason, what, given_s = "TTFT_TIMEOUT", "the first token did not arrive", self._ttft_s
        text = f"{what} within its {given_s:g} s; {token_count} tokens arrived"
        return DeadlinePassed.after(reason, text, last_reason, last_message)

    def on_lost(self, what: str, context: RetryContext) -> Retry | GiveUp:
        """The call broke without a status of the mesh, or its frontend became unresponsive."""
        self._progress(context)
        self._superseded = 0
        error = MeshUnavailable("FRONTEND_LOST", what, code="UNAVAILABLE")
        at_once = context.has_other or not self._streak
        return self._retry(error, context, self._backoff_s(context, at_once=at_once))

    def on_error(self, details: ErrorDetails, context: RetryContext) -> Retry | GiveUp:
        """The call ended with a status other than OK."""
        if is_too_large(details):
            return GiveUp(RequestRefused("MESSAGE_TOO_LARGE", details.message, code=details.code.name))
        if _is_lost(details):
            return self.on_lost(details.message, context)
        self._progress(context)
        error, is_superseded = error_of(details), details.reason == "SUPERSEDED"
        self._superseded = self._superseded + 1 if is_superseded else 0
        if is_superseded and self._has_own_key and self._superseded <= SUPERSEDED_MAX:
            # Only a late earlier send of this request can have superseded the call. A new send is later and wins.
            return self._retry(error, context, self._backoff_s(context, at_once=False))
        if isinstance(error, MeshFull) and details.reason != "SLOW_READER":
            return self._on_full(error, details, context)
        if isinstance(error, DeadlinePassed):
            return GiveUp(self._over(error, details, context))
        if not isinstance(error, MeshUnavailable) or self._is_too_late(details, context):
            return GiveUp(error)
        return self._retry(error, context, self._delay_s(details, context))

    def on_changed_request(self, details: ErrorDetails, context: RetryContext) -> Retry | GiveUp:
        """The next send differs: another frontend may read the resume token, an older token helps, or it begins anew."""
        self._progress(context)
        self._superseded = 0
        return self._retry(error_of(details), context, self._backoff_s(context, at_once=not self._streak))

    def on_refused_by_region(self, details: ErrorDetails, context: RetryContext) -> Retry | GiveUp:
        """A whole region refused the request; the next send goes to another region."""
        self._progress(context)
        self._superseded = 0
        return self._retry(error_of(details), context, self._backoff_s(context, at_once=context.has_other))

    def _over(self, error: DeadlinePassed, details: ErrorDetails, context: RetryContext) -> DeadlinePassed:
        """Return the caller's error for a deadline status of a frontend, which knows only the time of its own call."""
        last_reason, last_message = details.metadata.get("fault", ""), details.message
        if self._last is not None and last_reason in ("", self._last.reason):
            last_reason, last_message = self._last.reason, self._last.message
        is_time_over = error.reason in ("DEADLINE", "TTFT_TIMEOUT")
        if is_time_over and context.now_s >= self.until_s(context.token_count) - DEADLINE_SLACK_S:
            return self._deadline_passed(context.token_count, last_reason, last_message)
        if self._last is None:
            return error
        return DeadlinePassed.after(
            error.reason, error.message, self._last.reason, self._last.message, error.retry_after_s
        )

    def _progress(self, context: RetryContext) -> None:
        if context.token_count > self._token_count:
            self._last = None
            self._token_count = context.token_count
            self._streak = self._refusals = 0
            self._refused_since_s = None

    def _on_full(self, error: MeshFull, details: ErrorDetails, context: RetryContext) -> Retry | GiveUp:
        """The mesh is full."""
        self._refusals += 1
        if self._refused_since_s is None:
            self._refused_since_s = context.now_s
        after_s = self._delay_s(details, context)
        if not context.token_count:
            is_over = self._refusals >= self._retry_policy.refusals_max or self._is_too_late(details, context)
            step = GiveUp(error) if is_over else self._retry(error, context, after_s)
            is_free = isinstance(error, QuotaExceeded) or details.reason in FRONTEND_REASONS
            if isinstance(step, Retry) and not is_free and not self._budget.take(context.now_s):
                return GiveUp(error)
            return step
        if context.now_s - self._refused_since_s >= FULL_WAIT_S:
            return GiveUp(error)
        self._streak = min(self._streak, self._retry_policy.sends_max - 2)  # FULL_WAIT_S is the bound
        return self._retry(error, context, after_s)

    def _is_too_late(self, details: ErrorDetails, context: RetryContext) -> bool:
        """Return whether Retry-After exceeds the retry policy's limit. A request with tokens waits in any case."""
        max_s, asked_s = self._retry_policy.retry_after_max_s, details.retry_after_s
        if context.token_count or details.reason in FRONTEND_REASONS:
            return False
        return max_s == 0 or (asked_s is not None and asked_s > max_s)

    def _delay_s(self, details: ErrorDetails, context: RetryContext) -> float:
        """Return the wait after a status of the mesh: backoff, or Retry-After with jitter if longer."""
        is_frontends = details.reason in FRONTEND_REASONS
        if is_frontends and context.has_other:
            return self._backoff_s(context, at_once=True)
        backoff_s = self._backoff_s(context, at_once=False)
        if details.retry_after_s is None:
            return backoff_s
        after_s = max(backoff_s, details.retry_after_s * (1 + 0.25 * context.jitter))
        until_s = self.until_s(context.token_count)
        # The Retry-After of one frontend does not end the request before its deadline: another may be back earlier.
        return backoff_s if is_frontends and context.now_s + after_s >= until_s else after_s

    def _retry(self, error: GenerateError, context: RetryContext, after_s: float) -> Retry | GiveUp:
        self._streak += 1
        self._last = error
        limit = self._retry_policy.limit_of_sends(context.token_count)
        if self._streak >= limit or self.sends >= SENDS_TOTAL_MAX:
            return GiveUp(error)
        until_s = self.until_s(context.token_count)
        if context.now_s >= until_s:
            return GiveUp(self.deadline_passed(context.token_count))
        if context.now_s + after_s >= until_s:
            return GiveUp(error)
        return Retry(after_s)

    def _backoff_s(self, context: RetryContext, *, at_once: bool) -> float:
        """Return the exponential backoff with jitter; with `at_once`, the first two consecutive sends have none."""
        if at_once and self._streak < 2:
            return 0.0
        retry_policy = self._retry_policy
        backoff_s = min(
            retry_policy.backoff_max_s, retry_policy.backoff_min_s * float(2 ** min(self._streak, 16))
        )
        return backoff_s * (0.5 + 0.5 * context.jitter)


def is_too_large(details: ErrorDetails) -> bool:
    """True if gRPC itself refused the message, before the frontend could say so."""
    return details.code.name == "RESOURCE_EXHAUSTED" and not details.reason and TOO_LARGE in details.message


def _is_lost(details: ErrorDetails) -> bool:
    return not details.reason and details.code.name in TRANSPORT_STATUSES
