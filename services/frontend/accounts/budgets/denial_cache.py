"""The last denial of one account (negative cache): a crowd of refused requests does not reach Redis. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kvmesh.buckets.limits import Account
from kvmesh.buckets.operations import Denied

TTL_S: Final = 0.1
"""Time for which a denial is cached."""

CONCURRENCY_TTL_S: Final = 0.02
"""The same, for a denial by concurrency or open overrun: a request that ends at any frontend ends the denial."""


class DenialCache:
    """The last denial of one account; empty at first."""

    __slots__ = ("_denied", "_denied_at_s", "_overrun", "_s_per_token", "_tokens", "_until_s")

    def __init__(self) -> None:
        self._denied: Denied | None = None
        self._denied_at_s = self._until_s = 0.0
        self._tokens = self._overrun = 0
        """Tokens and open overrun of the denied request."""
        self._s_per_token = 0.0

    def put(self, denied: Denied, account: Account, tokens: int, overrun: int, now_s: float) -> None:
        """Cache the denial of a request of `tokens` with open `overrun`."""
        self._denied, self._denied_at_s = denied, now_s
        ttl_s = CONCURRENCY_TTL_S if denied.reason in ("concurrency", "overrun") else TTL_S
        self._until_s = now_s + min(denied.wait_s or 0.0, ttl_s)
        self._tokens, self._overrun = tokens, overrun
        self._s_per_token = 0.0
        if denied.reason == "tokens":  # a smaller request waits less
            limits = (scope.limit for scope in account.scopes if scope.name == denied.scope)
            self._s_per_token = 60 / next(limits).tokens_per_min

    def get(self, tokens: int, overrun: int, now_s: float) -> Denied | None:
        """Return the cached denial if it holds for a request of `tokens` and `overrun`, else None."""
        denied = self._denied
        if denied is None or now_s >= self._until_s:
            return None
        if denied.reason == "overrun" and overrun < self._overrun:
            return None
        if denied.is_claimed and tokens > self._tokens:
            return None  # the claim may be for this request
        wait_s = (denied.wait_s or 0.0) - (now_s - self._denied_at_s)
        if denied.reason == "tokens" and not denied.is_claimed:
            wait_s += (tokens - self._tokens) * self._s_per_token
        if wait_s <= 0:
            return None
        return replace(denied, wait_s=wait_s)

    def clear(self) -> None:
        """Drop the cached denial: tokens or slots came back."""
        self._denied = None
