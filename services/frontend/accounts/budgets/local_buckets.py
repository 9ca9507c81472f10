"""Local buckets: admission control of a frontend while Redis is unavailable (degraded mode), and the outage itself.

Pure. Each scope has a local token bucket at SHARE / frontends of its limit. The bucket starts with SHARE / frontends of the
level that Redis last reported, refilled since. After OUTAGE_S, requests of sheddable classes are refused (load shedding).
When Redis is back, the local spending is taken from its levels, never below 0. Requests are admitted locally for up to
TOGETHER_S more, so that all frontends report their spending before the first one asks Redis again.

Bound on overspending, for each scope, of one frontend that is cut off for T seconds while the others continue. `limit` is
in tokens per minute:

    charged locally <= max(SHARE x burst / frontends, largest request) + SHARE x limit / 60 / frontends x T

A request takes the most that it may use, so it opens no overrun (decision 0025). For each organisation one frontend, chosen
by hash, admits requests larger than the bucket.

If all frontends are cut off together, all charges are local. The charges of any w seconds are then at most
limit / 60 x w + burst, and SHARE x burst more if the levels were lower than last reported. Concurrency limit: at most
max(1, floor(SHARE x limit / frontends)) requests of a frontend run at a time. Resumed requests are admitted in any case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final
from zlib import crc32

from kvmesh.buckets.limits import Account, Limit, Scope
from kvmesh.buckets.operations import Denied, RemainingBudget

SHARE: Final = 0.8
OUTAGE_S: Final = 60.0
"""Length of an outage after which sheddable classes are refused."""

TOGETHER_S: Final = 1.0
"""Time in which all frontends notice that Redis is back. After a shorter outage they wait as long as the outage lasted."""


class Outage:
    """The state of the circuit to Redis: closed -> open -> half-open -> closed, and half-open -> open."""

    __slots__ = ("back_at_s", "lost_at_s", "total")

    def __init__(self) -> None:
        self.lost_at_s: float | None = None
        """Start of the outage, from which requests are admitted locally. None: Redis is asked."""
        self.back_at_s: float | None = None
        """First answer of Redis in the outage; None: no answer yet."""
        self.total = 0

    def lose(self, now_s: float) -> bool:
        """Open the circuit: Redis is unavailable. Return True if the circuit was closed."""
        self.back_at_s = None
        if self.lost_at_s is not None:
            return False
        self.lost_at_s = now_s
        self.total += 1
        return True

    def answer(self, now_s: float) -> None:
        """Note an answer of Redis."""
        if self.lost_at_s is not None and self.back_at_s is None:
            self.back_at_s = now_s

    def may_end(self, now_s: float) -> bool:
        """True if the other frontends had time to notice that Redis is back."""
        if self.lost_at_s is None or self.back_at_s is None:
            return False
        return now_s - self.back_at_s >= min(TOGETHER_S, self.back_at_s - self.lost_at_s)

    def end(self) -> None:
        """Close the circuit: Redis knows all reservations and is asked again."""
        self.lost_at_s = self.back_at_s = None

    def is_shedding(self, now_s: float) -> bool:
        """True if sheddable classes are refused."""
        return self.lost_at_s is not None and self.back_at_s is None and now_s - self.lost_at_s >= OUTAGE_S


@dataclass(slots=True)
class _Bucket:
    """The local bucket of one scope. An unlimited kind has no level."""

    tokens: float
    requests: float
    at_s: float
    slots: int = 0
    """Running requests of this frontend, admitted locally or not."""


class LocalBuckets:
    """The buckets of one outage."""

    def __init__(self, frontends: int, rank: int = 0) -> None:
        self.resize(frontends, rank)
        self._buckets: dict[tuple[str, str], _Bucket] = {}

    def resize(self, frontends: int, rank: int) -> None:
        """Set the number of frontends that share the limits, and the rank of this one among them."""
        self._share = SHARE / frontends
        self._frontends, self._rank = frontends, rank

    def largest(self, account: Account) -> float:
        """Return the tokens of the largest request that this frontend may admit.

        All frontends together would exceed the bound if each admitted a request larger than its local bucket. One frontend
        alone may do so, chosen by a hash of the organisation's name.
        """
        if crc32(account.organisation.encode()) % self._frontends == self._rank:
            return math.inf
        bursts = (scope.limit.tokens_burst for scope in account.scopes if scope.limit.tokens_per_min)
        return min((self._share * burst for burst in bursts), default=math.inf)

    def open(
        self, account: Account, remaining: RemainingBudget | None, age_s: float, live: int, now_s: float
    ) -> None:
        """Open the buckets of an account: Redis reported `remaining` `age_s` ago, and `live` requests run here.

        Called once for each account. Accounts that share a scope add their requests; the first one gives the level.
        """
        for scope in account.scopes:
            key = account.organisation, scope.name
            bucket = self._buckets.get(key)
            if bucket is None:
                bucket = self._buckets[key] = self._start(scope.limit, remaining, age_s, now_s)
            bucket.slots += live

    def admit(self, account: Account, tokens: int, now_s: float, *, is_forced: bool) -> Denied | None:
        """Take one request from all scopes of the account, or return the refusal of one scope and take nothing.

        `is_forced`: a resumed request, which is never refused.
        """
        buckets = [self._refilled(account, scope, now_s) for scope in account.scopes]
        if not is_forced:
            denied: Denied | None = None
            for scope, bucket in zip(account.scopes, buckets, strict=True):
                found = self._judge(scope, bucket, tokens, denied)
                if found is not None:
                    denied = found
            if denied is not None:
                return denied
        for bucket in buckets:
            bucket.tokens -= tokens
            bucket.requests -= 1
            bucket.slots += 1
        return None

    def hold(self, account: Account) -> None:
        """Count a running request that was not admitted locally."""
        for scope in account.scopes:
            self._buckets[account.organisation, scope.name].slots += 1

    def release(self, account: Account) -> None:
        """Count a request that has ended, admitted locally or not."""
        for scope in account.scopes:
            self._buckets[account.organisation, scope.name].slots -= 1

    def give_back(self, account: Account, tokens: int, requests: int, now_s: float) -> None:
        """Return unused tokens and requests; tokens below 0 are an overrun."""
        for scope in account.scopes:
            bucket = self._refilled(account, scope, now_s)
            cap = self._share * scope.limit.tokens_burst
            bucket.tokens = min(max(cap, bucket.tokens), bucket.tokens + tokens)
            cap = self._share * scope.limit.requests_burst
            bucket.requests = min(max(cap, bucket.requests), bucket.requests + requests)

    def remaining(self, account: Account) -> RemainingBudget:
        """Return the least remainder of each kind over the account's scopes."""
        least = RemainingBudget()
        for scope in account.scopes:
            bucket, limit = self._buckets[account.organisation, scope.name], scope.limit
            free = max(0, self._slots(limit) - bucket.slots)
            least = RemainingBudget(
                _least(least.requests, bucket.requests if limit.requests_per_min else None),
                _least(least.tokens, bucket.tokens if limit.tokens_per_min else None),
                least.concurrency if not limit.concurrency else min(free, least.concurrency or free),
            )
        return least

    def _start(self, limit: Limit, remaining: RemainingBudget | None, age_s: float, now_s: float) -> _Bucket:
        tokens, requests = limit.tokens_burst, limit.requests_burst
        if remaining is not None and remaining.tokens is not None:
            tokens = min(tokens, remaining.tokens + age_s * limit.tokens_per_min / 60)
        if remaining is not None and remaining.requests is not None:
            requests = min(requests, remaining.requests + age_s * limit.requests_per_min / 60)
        return _Bucket(self._share * tokens, self._share * requests, now_s)

    def _refilled(self, account: Account, scope: Scope, now_s: float) -> _Bucket:
        bucket, limit = self._buckets[account.organisation, scope.name], scope.limit
        passed = self._share * max(0.0, now_s - bucket.at_s) / 60
        bucket.at_s = max(bucket.at_s, now_s)
        tokens_max, requests_max = self._share * limit.tokens_burst, self._share * limit.requests_burst
        bucket.tokens = max(bucket.tokens, min(tokens_max, bucket.tokens + passed * limit.tokens_per_min))
        bucket.requests = max(
            bucket.requests, min(requests_max, bucket.requests + passed * limit.requests_per_min)
        )
        return bucket

    def _judge(self, scope: Scope, bucket: _Bucket, tokens: int, denied: Denied | None) -> Denied | None:
        """Return the refusal of this scope if its wait is not shorter than that of `denied`, the refusal of an outer scope.

        A request larger than the bucket is admitted when the bucket is full. The debt is refilled before the next
        admission. A concurrency limit refuses only if no rate limit does.
        """
        limit, remaining = scope.limit, RemainingBudget(bucket.requests, bucket.tokens, None)
        worst = denied.wait_s or 0.0 if denied is not None else 0.0
        found: Denied | None = None
        if limit.tokens_per_min:
            missing = min(tokens, self._share * limit.tokens_burst) - bucket.tokens
            wait_s = _wait_s(missing, self._share * limit.tokens_per_min)
            if missing > _NOISE and wait_s >= worst:
                worst, found = wait_s, Denied("tokens", scope.name, wait_s, remaining)
        if limit.requests_per_min:
            missing = min(1.0, self._share * limit.requests_burst) - bucket.requests
            wait_s = _wait_s(missing, self._share * limit.requests_per_min)
            if missing > _NOISE and wait_s >= worst:
                found = Denied("requests", scope.name, wait_s, remaining)
        if found is None and denied is None and limit.concurrency and bucket.slots >= self._slots(limit):
            found = Denied("concurrency", scope.name, None, remaining)
        return found

    def _slots(self, limit: Limit) -> int:
        return max(1, math.floor(self._share * limit.concurrency))


_NOISE: Final = 1e-6
"""Error of levels, which are sums of floats."""


def _wait_s(missing: float, per_min: float) -> float:
    return 60.0 * max(0.0, missing) / per_min


def _least(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return one if other is None else other
    return min(one, other)
