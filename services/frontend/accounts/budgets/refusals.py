"""Errors for requests that a limit refuses, with the wait and the quota.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final, TypeAlias

from kvmesh.buckets.limits import Account, Limit
from kvmesh.buckets.operations import Denied, Reason, RemainingBudget
from kvmesh.errors import MeshError, QuotaViolation
from services.frontend.accounts import trailers

REASONS: Final[dict[Reason, str]] = {
    "requests": "REQUEST_RATE_EXCEEDED",
    "tokens": "TOKEN_RATE_EXCEEDED",
    "concurrency": "CONCURRENCY_EXCEEDED",
    "overrun": "TOKEN_RATE_EXCEEDED",
    "burst": "COST_EXCEEDS_BURST",
}

UNAVAILABLE_RETRY_S: Final = 5.0

OVERRUN: Final = "overrun_tokens"
"""Metadata key of a refusal for open overrun: tokens that the request may use beyond its reservation."""

_KEPT: Final = 256
"""Entries in the cache of refusal texts. Many refused requests have few different texts."""

_Phrase: TypeAlias = tuple[str, str, Mapping[str, str], tuple[QuotaViolation, ...]]
"""Reason, message, metadata, quota."""


def denied_error(account: Account, denied: Denied, tokens: int, overrun: int = 0) -> MeshError:
    """Return the error for a request that needed `tokens`, with the exact wait, without jitter.

    `tokens`: 0 if the need was not computed. `overrun`: tokens that the request might use beyond them.
    """
    if denied.reason != "overrun":
        overrun = 0
    reason, message, metadata, quota = _phrase(
        account, denied.reason, denied.scope, tokens, overrun, denied.overrun_excess
    )
    return MeshError(
        reason,
        message,
        metadata=metadata,
        retry_after_s=None if denied.reason == "burst" else denied.wait_s,
        quota=quota,
        trailers=trailers.of_remaining(denied.remaining),
    )


@lru_cache(maxsize=_KEPT)
def _phrase(account: Account, reason: Reason, scope: str, tokens: int, overrun: int, excess: int) -> _Phrase:
    """Return the common parts of all refusals of the account for one reason."""
    limit = next((each.limit for each in account.scopes if each.name == scope), Limit())
    allowed, description = _described(reason, limit, tokens)
    metadata = {"scope": scope, "limit": allowed}
    if reason == "overrun":
        metadata |= {"key": "tokens_overrun", OVERRUN: str(overrun)}
        description += (
            f"; this request may use {overrun} more, so {excess} open tokens must close first: "
            "request less output, or retry later"
        )
    if tokens:
        metadata["needed_tokens"] = str(tokens)
    quota = (QuotaViolation(scope, description),)
    return REASONS[reason], f"{scope}: {description}", MappingProxyType(metadata), quota


def unavailable_error(account: Account, tokens: int, fits: float, remaining: RemainingBudget) -> MeshError:
    """Return the error for a request larger than this frontend may admit while Redis is unavailable."""
    return MeshError(
        "BUDGET_UNAVAILABLE",
        f"the budgets are unavailable: until they are back, this frontend admits requests of at most {fits:.0f} tokens, "
        f"prompt and max_output_tokens together, and this request may use {tokens}; request less output, or retry later",
        metadata={
            "scope": account.scopes[-1].name,
            "limit": f"{fits:.0f}",
            "needed_tokens": str(tokens),
        },
        retry_after_s=UNAVAILABLE_RETRY_S,
        trailers=trailers.of_remaining(remaining),
    )


def shed_error(account: Account, remaining: RemainingBudget) -> MeshError:
    """Return the error for a request of a sheddable class during a long outage of Redis (load shedding)."""
    return MeshError(
        "BUDGET_UNAVAILABLE",
        "the budgets are unavailable, and requests of this class are refused until they are back",
        metadata={"scope": account.scopes[-1].name},
        retry_after_s=UNAVAILABLE_RETRY_S,
        trailers=trailers.of_remaining(remaining),
    )


def _described(reason: Reason, limit: Limit, tokens: int) -> tuple[str, str]:
    """Return the limit, and a sentence that states it."""
    if reason == "requests":
        requests = f"{limit.requests_per_min:.10g}"
        return requests, f"the limit of {requests} requests per minute is reached"
    if reason == "tokens":
        per_min = f"{limit.tokens_per_min:.0f}"
        return per_min, f"the limit of {per_min} tokens per minute is reached"
    if reason == "concurrency":
        return (
            f"{limit.concurrency}",
            f"the limit of {limit.concurrency} running requests is reached",
        )
    if reason == "overrun":
        overrun = f"{limit.tokens_overrun:.0f}"
        return (
            overrun,
            f"the limit of {overrun} tokens beyond the reservations of running requests is reached (tokens_overrun)",
        )
    burst = limit.tokens_burst
    return (
        f"{burst:.0f}",
        f"the request needs {tokens} tokens; at most {burst:.0f} can be reserved at once (tokens_burst)",
    )
