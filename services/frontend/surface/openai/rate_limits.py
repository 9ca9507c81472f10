"""Headers `x-ratelimit-*`, from the remaining budget in the trailers of a call. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from kvmesh.buckets.limits import Account, Limit
from services.frontend.accounts import trailers

_KINDS: Final = (
    (b"requests", trailers.REQUESTS),
    (b"tokens", trailers.TOKENS),
)


def headers(given: Mapping[str, str], account: Account | None) -> list[tuple[bytes, bytes]]:
    """Return the headers for the trailers `given` of a caller with `account`. Kinds without a limit have none.

    `limit` is the smallest burst among the caller's scopes, `reset` the time in which that bucket is full again.
    """
    if not given or account is None:
        return []
    return [header for kind, key in _KINDS if key in given for header in _of(kind, given[key], account)]


def _of(kind: bytes, remaining: str, account: Account) -> Iterator[tuple[bytes, bytes]]:
    yield b"x-ratelimit-remaining-" + kind, remaining.encode()
    buckets = [bucket for scope in account.scopes if (bucket := _bucket(kind, scope.limit))[1]]
    if buckets:
        burst, per_min = min(buckets)
        missing = max(0.0, burst - float(remaining))
        yield b"x-ratelimit-limit-" + kind, b"%d" % burst
        yield b"x-ratelimit-reset-" + kind, b"%.3fs" % (missing / per_min * 60.0)


def _bucket(kind: bytes, limit: Limit) -> tuple[float, float]:
    """Return burst and units per minute; 0 per minute: no limit."""
    if kind == b"requests":
        return limit.requests_burst, limit.requests_per_min
    return limit.tokens_burst, limit.tokens_per_min
