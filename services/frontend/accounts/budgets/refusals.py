"""What a caller is told when a limit refuses its request.

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
"""In the metadata of a refusal for open overrun: tokens that the request may use beyond its reservation."""

_KEPT: Final = 256
"""Phrases that are kept: a crowd is refused for the same few."""

_Phrase: TypeAlias = tuple[str, str, Mapping[str, str], tuple[QuotaViolation, ...]]
"""Reason, message, metadata, quota."""


def denied_error(account: Account, denied: Denied, tokens: int, overrun: int = 0) -> MeshError:
    """Return the error for a request that wanted to reserve `tokens`, with the exact wait: no jitter.

    `tokens`: 0 if the need was not computed. `overrun`: tokens that it might use beyond.
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
    """Return what all refusals of the account for one reason have in common."""
    limit = next((each.limit for each in account.scopes if each.name == scope), Limit())
    allowed, description = _described(reason, limit, tokens)
    metadata = {"scope": scope, "limit": allowed}
    if reason == "overrun":
        metadata |= {"key": "tokens_overrun", OVERRUN: str(overrun)}
        description += (
            f"; this request may use {overrun}, so {excess} of those that are open must be reserved or end first: ask for "
            "less output, or come back"
        )
    if tokens:
        metadata["needed_tokens"] = str(tokens)
    quota = (QuotaViolation(scope, description),)
    return REASONS[reason], f"{scope}: {description}", MappingProxyType(metadata), quota


def unavailable_error(account: Account, tokens: int, fits: float, remaining: RemainingBudget) -> MeshError:
    """Return the error for a request that may use more than this frontend may admit while budgets cannot be asked."""
    return MeshError(
        "BUDGET_UNAVAILABLE",
        f"budgets cannot be asked at the moment; until they can, this frontend admits requests of at most {fits:.0f} "
        f"tokens, prompt and max_output_tokens together, and this one may use {tokens}: ask for less output, or come back",
        metadata={
            "scope": account.scopes[-1].name,
            "limit": f"{fits:.0f}",
            "needed_tokens": str(tokens),
        },
        retry_after_s=UNAVAILABLE_RETRY_S,
        trailers=trailers.of_remaining(remaining),
    )


def shed_error(account: Account, remaining: RemainingBudget) -> MeshError:
    """Return the error for a request of a sheddable class while budgets cannot be asked for long."""
    return MeshError(
        "BUDGET_UNAVAILABLE",
        "budgets cannot be asked at the moment, and requests of this class wait until they can",
        metadata={"scope": account.scopes[-1].name},
        retry_after_s=UNAVAILABLE_RETRY_S,
        trailers=trailers.of_remaining(remaining),
    )


def _described(reason: Reason, limit: Limit, tokens: int) -> tuple[str, str]:
    """Return the limit and a sentence about it."""
    if reason == "requests":
        requests = f"{limit.requests_per_min:.10g}"
        return requests, f"the limit of {requests} requests per minute is reached"
    if reason == "tokens":
        per_min = f"{limit.tokens_per_min:.0f}"
        return per_min, f"the limit of {per_min} tokens per minute is reached"
    if reason == "concurrency":
        return (
            f"{limit.concurrency}",
            f"so many requests as may run at a time are running: {limit.concurrency}",
        )
    if reason == "overrun":
        overrun = f"{limit.tokens_overrun:.0f}"
        return (
            overrun,
            f"running requests may use {overrun} tokens beyond their reservations (tokens_overrun)",
        )
    burst = limit.tokens_burst
    return f"{burst:.0f}", f"at most {burst:.0f} tokens can be reserved at once; the request needs {tokens}"
