"""A quota lease: the part of a hot account that one frontend holds, to admit most requests without a round trip.

Pure. A quota lease is one reservation in the account's token buckets, held for many requests. A request is promised tokens
that Redis granted to the lease before, so the lease cannot overspend. Unused tokens return to the lease.

    INVARIANT: tokens held in Redis >= free + promised to running requests
    INVARIANT: open overrun held in Redis >= free + promised to running requests

Open overrun is the number of tokens that running requests may use beyond their promises. Used tokens are those charged
since the lease was opened. The next draw reports them.

A draw requests an amount to be free from now on. The amount is at most SHARE of the burst, and of the limit of open
overrun, divided by the number of frontends. It is at most HORIZON_S of the demand. Tokens that a draw may give back are
withheld from the moment of the draw. Tokens that a draw may bring are used only after its answer. A lost answer therefore
does no harm.

The lease of a cold account holds only the tokens of running requests. A dead frontend costs at most its quota leases, which
are swept when they expire. A request that overruns takes free tokens of the lease, then tokens of the account as debt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from kvmesh.buckets.limits import Account

SHARE: Final = 0.25
"""Share of a burst that the free parts of all frontends' quota leases may hold together."""

HORIZON_S: Final = 0.5
"""Demand that the free part covers."""

HOT_PER_S: Final = 8.0
"""Requests per second from which an account has a quota lease. Below half of this rate the lease is given back."""

HALF_LIFE_S: Final = 0.5
"""Half-life of the measured demand."""

AGAIN_S: Final = 0.05
"""Least time between two draws. The levels of an account that wants more than its limit refill slowly."""

RENEW_S: Final = 5.0
"""Longest time between two draws; each of them renews the lease."""

_REQUESTS_MIN: Final = 2
"""A quota lease for fewer requests saves no round trip."""


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """A draw of a quota lease, with the fields of kvmesh.buckets.operations.Draw."""

    number: int
    used_tokens: int
    used_requests: int
    tokens: int
    requests: int
    slots: int
    least_tokens: int
    least_slots: int
    overrun: int = 0
    least_overrun: int = 0


class LeaseAmounts(NamedTuple):
    """Amounts of each of the four resources of a lease. A cap without a limit is infinite; a mark of -1 is not reached."""

    tokens: float = 0
    requests: float = 0
    slots: float = 0
    overrun: float = 0


class LeaseDemand:
    """The demand of one account at one frontend, as moving averages with HALF_LIFE_S."""

    __slots__ = ("_overrun", "_requests", "_seen_at_s", "_tokens", "overrun_rate", "rate", "token_rate")

    def __init__(self, now_s: float) -> None:
        self.rate = 0.0
        """Requests per second."""
        self.token_rate = self.overrun_rate = 0.0
        """Tokens per second that requests reserve, and that they may use beyond."""
        self._requests = self._tokens = self._overrun = 0
        """Counts since the last measurement."""
        self._seen_at_s = now_s

    def count(self, tokens: int, overrun: int) -> None:
        """Count one request."""
        self._requests += 1
        self._tokens += tokens
        self._overrun += overrun

    def measure(self, now_s: float) -> None:
        """Take the counts into the averages."""
        passed_s = now_s - self._seen_at_s
        if passed_s < AGAIN_S:
            return
        weight = 1.0 - 0.5 ** (passed_s / HALF_LIFE_S)
        self.rate += weight * (self._requests / passed_s - self.rate)
        self.token_rate += weight * (self._tokens / passed_s - self.token_rate)
        self.overrun_rate += weight * (self._overrun / passed_s - self.overrun_rate)
        self._requests = self._tokens = self._overrun = 0
        self._seen_at_s = now_s

    def forget(self) -> None:
        """Start again without demand."""
        self.rate = self.token_rate = self.overrun_rate = 0.0
        self._requests = self._tokens = self._overrun = 0


class QuotaLease:
    """The quota lease of one account at one frontend, named `rid` in Redis. Its first draw opens it, once.

    Free requests and slots are below 0 only after Redis lost its memory. Free tokens are below 0 also after an overrun.
    """

    __slots__ = (
        *("_asked", "_caps", "_demand", "_drew_at_s", "_low", "_number", "_told_requests"),
        *("free_overrun", "free_requests", "free_slots", "free_tokens", "is_hot", "is_low", "live_slots"),
        *("open_requests", "promised_overrun", "promised_tokens", "rid", "used_requests", "used_tokens"),
    )

    def __init__(self, rid: str, account: Account, frontends: int, now_s: float) -> None:
        self.rid = rid
        self.free_tokens = self.free_requests = self.free_slots = self.free_overrun = 0
        self.promised_tokens = self.promised_overrun = 0
        self.open_requests = 0
        """Requests without a settlement."""
        self.live_slots = 0
        self.used_tokens = self.used_requests = 0
        """Tokens charged and requests admitted since the lease was opened."""
        self.is_hot = False
        self.is_low = False
        """True if `draw` is due soon."""
        self._demand = LeaseDemand(now_s)
        self._number = 0
        self._told_requests = 0
        self._asked: DrawRequest | None = None
        self._drew_at_s = float("-inf")
        self._low = LeaseAmounts(overrun=-1)
        """Free amounts from which a draw is due."""
        self._caps = LeaseAmounts()
        """Largest free amounts."""
        self.resize(account, frontends)

    def __repr__(self) -> str:
        return (
            f"QuotaLease({self.rid}: {self.free_tokens}+{self.promised_tokens} tokens, {self.free_requests} requests, "
            f"{self.free_slots}+{self.live_slots} slots, {self.free_overrun}+{self.promised_overrun} overrun, used "
            f"{self.used_tokens} by {self.used_requests})"
        )

    @property
    def is_open(self) -> bool:
        """True if Redis may hold something for the lease."""
        return self._number > 0

    @property
    def is_holding(self) -> bool:
        """True if Redis may hold more for the lease than its open requests need."""
        has_free = self.free_tokens + self.free_requests > 0 or self.free_overrun > 0
        return self.is_drawing or self.is_over or (self.is_open and has_free)

    @property
    def is_drawing(self) -> bool:
        """True while a draw is in flight."""
        return self._asked is not None

    @property
    def is_over(self) -> bool:
        """True if the lease is open without a running or an expected request. Settle it, and use a new lease then."""
        return self.is_open and not (self.is_hot or self.is_drawing or self.open_requests or self.live_slots)

    def resize(self, account: Account, frontends: int) -> None:
        """Set the number of frontends that share the account's bursts."""

        def cap(bursts: list[float]) -> float:
            return SHARE * min(bursts) / frontends if bursts else float("inf")

        limits = [scope.limit for scope in account.scopes]
        self._caps = LeaseAmounts(
            cap([limit.tokens_burst for limit in limits if limit.tokens_per_min]),
            cap([limit.requests_burst for limit in limits if limit.requests_per_min]),
            cap([float(limit.concurrency) for limit in limits if limit.concurrency]),
            cap([limit.tokens_overrun for limit in limits if limit.tokens_per_min and limit.tokens_overrun]),
        )

    def want(self, tokens: int, overrun: int = 0) -> None:
        """Count one request of the account for the demand, admitted from the lease or not."""
        self._demand.count(tokens, overrun)

    def admit(self, tokens: int, overrun: int = 0) -> bool:
        """Promise `tokens` to one request. False: they are not free, and the request must ask Redis.

        `overrun`: tokens that the request may use beyond its promise.
        """
        free = self.free_tokens - tokens
        if free < 0 or self.free_requests <= 0 or self.free_slots <= 0 or self.free_overrun < overrun:
            return False
        self.free_tokens = free
        self.promised_tokens += tokens
        self.free_overrun -= overrun
        self.promised_overrun += overrun
        self.free_requests -= 1
        self.used_requests += 1
        self.open_requests += 1
        self.free_slots -= 1
        self.live_slots += 1
        low_tokens, low_requests, low_slots, low_overrun = self._low
        if (
            free < low_tokens
            or self.free_requests < low_requests
            or self.free_slots < low_slots
            or self.free_overrun < low_overrun
        ):
            self.is_low = True
        return True

    def extend(self, tokens: int) -> None:
        """Turn `tokens` of a running request's open overrun into a promise, even if they are not free."""
        self.promised_tokens += tokens
        self.free_tokens -= tokens
        self.promised_overrun -= tokens
        self.free_overrun += tokens
        if self.free_tokens < 0:
            self.is_low = True

    def release(self) -> None:
        """Free the slot of a request that ended. Its tokens may be known later."""
        self.live_slots -= 1
        self.free_slots += 1

    def settle(self, tokens: int, actual_tokens: int, *, refund_request: bool, overrun: int = 0) -> None:
        """Take back the promised `tokens` of a request, less its charge, and its open `overrun`.

        `release` frees its slot.
        """
        self.promised_overrun -= overrun
        self.free_overrun += overrun
        self.promised_tokens -= tokens
        self.used_tokens += actual_tokens
        self.free_tokens += tokens - actual_tokens
        self.open_requests -= 1
        if refund_request:
            self.used_requests -= 1
            self.free_requests += 1
        if self.free_tokens < 0:
            self.is_low = True

    def draw(self, now_s: float, *, may_grow: bool = True) -> DrawRequest | None:
        """Return the draw that is due, or None. `drawn` or `lost` must follow before the next call with a result.

        Called at each tick, and when `is_low`. Without `may_grow` a draw only renews the lease.
        """
        self.is_low = False
        if self._asked is not None or now_s - self._drew_at_s < AGAIN_S:
            return None
        if not may_grow:
            free = (max(0, self.free_tokens), max(0, self.free_requests), self.free_slots, self.free_overrun)
            return self._ask(*free, now_s) if self.is_open and self._is_due(now_s) else None
        self._demand.measure(now_s)
        tokens, requests, slots, overrun = self._target()
        self._low = LeaseAmounts(tokens // 2, requests // 2, slots // 2, overrun // 2 if overrun else -1)
        free = (self.free_tokens, self.free_requests, self.free_slots, self.free_overrun)
        is_short = self.is_hot and any(amount <= low for amount, low in zip(free, self._low, strict=True))
        is_idle = not self.is_hot and any(free)
        if not (is_short or self.free_tokens < 0 or (self.is_open and (is_idle or self._is_due(now_s)))):
            return None
        return self._ask(tokens, requests, slots, overrun, now_s)

    def drawn(self, tokens: int, requests: int, slots: int, overrun: int = 0) -> None:
        """Take the answer of a draw: the amounts that Redis holds for the lease, less the reported use."""
        ask = self._answered()
        self.free_tokens = tokens - (self.used_tokens - ask.used_tokens) - self.promised_tokens
        # A request that was reported and is refunded afterwards stays reported; Redis skips the next one instead.
        self._told_requests = max(self._told_requests, ask.used_requests)
        self.free_requests = requests - (self.used_requests - self._told_requests)
        self.free_slots = slots - self.live_slots
        self.free_overrun = overrun - self.promised_overrun

    def lost(self) -> None:
        """The draw has no answer. Redis may have taken it or not."""
        self._answered()

    def forfeit(self) -> None:
        """Promise nothing more: Redis holds nothing for the lease."""
        self.free_tokens, self.free_requests, self.free_slots = min(0, self.free_tokens), 0, 0
        self.free_overrun = min(0, self.free_overrun)

    def cool(self) -> None:
        """Forget the demand: the next draw keeps only the tokens of running requests."""
        self._demand.forget()
        self.is_hot = False
        self._drew_at_s = float("-inf")

    def _ask(self, tokens: int, requests: int, slots: int, overrun: int, now_s: float) -> DrawRequest:
        """Return a draw that requests these free amounts, and withhold anything above them."""
        self._number += 1
        ask = DrawRequest(
            self._number,
            self.used_tokens,
            max(0, self.used_requests),
            self.promised_tokens + tokens,
            requests,
            self.live_slots + slots,
            self.promised_tokens,
            self.live_slots,
            self.promised_overrun + overrun,
            self.promised_overrun,
        )
        self._asked, self._drew_at_s = ask, now_s
        self.free_tokens = min(self.free_tokens, tokens)
        self.free_requests = min(self.free_requests, requests)
        self.free_slots = min(self.free_slots, slots)
        self.free_overrun = min(self.free_overrun, overrun)
        return ask

    def _is_due(self, now_s: float) -> bool:
        return now_s - self._drew_at_s >= RENEW_S

    def _answered(self) -> DrawRequest:
        ask, self._asked = self._asked, None
        assert ask is not None
        return ask

    def _target(self) -> tuple[int, int, int, int]:
        """Return the tokens, requests, slots and open overrun that are to be free."""
        demand, rate = self._demand, self._demand.rate
        self.is_hot = rate >= (HOT_PER_S / 2 if self.is_hot else HOT_PER_S)
        tokens_max, requests_max, slots_max, overrun_max = self._caps
        if not self.is_hot:
            return 0, 0, 0, 0
        needed = _REQUESTS_MIN * demand.token_rate / rate
        beyond = _REQUESTS_MIN * demand.overrun_rate / rate
        is_small = tokens_max < needed or requests_max < _REQUESTS_MIN or slots_max < _REQUESTS_MIN
        if is_small or overrun_max < beyond:
            self.is_hot = False
            return 0, 0, 0, 0
        requests = max(_REQUESTS_MIN, HORIZON_S * rate)
        tokens = min(tokens_max, max(needed, HORIZON_S * demand.token_rate))
        overrun = min(overrun_max, max(beyond, HORIZON_S * demand.overrun_rate))
        return int(tokens), int(min(requests_max, requests)), int(min(slots_max, requests)), int(overrun)
