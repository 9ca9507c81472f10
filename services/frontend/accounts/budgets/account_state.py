"""The state of one account at a frontend: quota lease, open reservations, remaining budget, and last denial.

Pure.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, auto
from typing import Final

from kvmesh.buckets.limits import Account
from kvmesh.buckets.operations import Denied, RemainingBudget, Spend
from kvmesh.drain_rate import DrainRate, Stock
from kvmesh.tenants.caller import Caller
from services.frontend.accounts.budgets.denial_cache import DenialCache
from services.frontend.accounts.budgets.quota_lease import QuotaLease

EXTEND_TOKENS: Final = 256
"""Tokens that a stream reserves ahead, again and again, near the end of its estimate. A sweep therefore charges the
output of a dead frontend's streams, and a debt exists before it is used."""

MARGIN_TOKENS: Final = 64
"""Tokens before the end of the reservation at which a stream reserves more; Redis answers meanwhile."""

END_WAIT_S: Final = 1.0
"""Assumed time until a request of the account ends, before any has ended."""

END_WAIT_MIN_S: Final = 0.02
END_WAIT_MAX_S: Final = 60.0


class AccountState:
    """The state of one account at one frontend."""

    __slots__ = (
        *("_closed", "_ends", "_remaining", "account", "burst", "has_slots", "has_tokens", "is_spending"),
        *("current_account", "denial_cache", "limits_version"),
        *(
            "live",
            "open",
            "open_overrun",
            "remaining_at_s",
            "seen_at_s",
            "quota_lease",
            "spending",
            "spent_requests",
            "spent_tokens",
        ),
    )

    def __init__(self, account: Account, quota_lease: QuotaLease, now_s: float) -> None:
        self.account = account
        self.current_account = account
        """The account with the limits of `limits_version`; see CurrentLimits."""
        self.limits_version = -1
        self.quota_lease = quota_lease
        self.live = 0
        """Running requests at this frontend."""
        self.open_overrun = 0
        """Tokens that running requests may be charged beyond their reservations."""
        self.open: dict[str, Reservation] = {}
        """Reservations without a settlement, except those from the quota lease."""
        self.spent_tokens = self.spent_requests = 0
        """Local spending of ended requests that Redis has not been sent."""
        self.spending: Spend | None = None
        """Local spending in flight; sent again under the same name without an answer."""
        self.is_spending = False
        """True while `spending` has no answer."""
        self.seen_at_s = now_s
        self.remaining_at_s = float("-inf")
        """Time of the last report of the remaining budget by Redis."""
        bursts = [
            (scope.limit.tokens_burst, scope.name) for scope in account.scopes if scope.limit.tokens_per_min
        ]
        self.burst = min(bursts, default=(float("inf"), ""))
        """Most tokens that can be reserved at once, and the scope with that limit."""
        self.has_tokens = bool(bursts)
        """True if tokens are limited."""
        self.has_slots = any(scope.limit.concurrency for scope in account.scopes)
        """True if the account has a concurrency limit."""
        self._remaining = RemainingBudget()
        self.denial_cache = DenialCache()
        self._closed = DrainRate(Stock.HELD)
        """Drain rate of open overrun here, in tokens."""
        self._ends = DrainRate(Stock.HELD)
        """Drain rate of requests here; measured only under a concurrency limit."""

    def __repr__(self) -> str:
        return f"AccountState({self.account.scopes[-1].name}: {self.live} live, {len(self.open)} open, {self.quota_lease})"

    @property
    def is_idle(self) -> bool:
        """True if nothing is held, owed or waiting here."""
        return not (self.live or self.open or self.owes or self.quota_lease.is_open)

    @property
    def owes(self) -> bool:
        """True if Redis does not know all local spending."""
        return bool(self.spending or self.spent_tokens or self.spent_requests)

    @property
    def remaining(self) -> RemainingBudget:
        """Remaining budget: the last report of Redis, plus the free part of the quota lease."""
        told, quota_lease = self._remaining, self.quota_lease
        if not quota_lease.is_open:
            return told
        return RemainingBudget(
            None if told.requests is None else told.requests + quota_lease.free_requests,
            None if told.tokens is None else told.tokens + quota_lease.free_tokens,
            None if told.concurrency is None else told.concurrency + quota_lease.free_slots,
        )

    @property
    def last_remaining(self) -> RemainingBudget | None:
        """Remaining budget as Redis last reported it; None: no report yet."""
        return self._remaining if self.remaining_at_s > float("-inf") else None

    def on_remaining(self, remaining: RemainingBudget, now_s: float) -> None:
        """Take the remaining budget that Redis reports."""
        self._remaining = remaining
        self.remaining_at_s = now_s

    def admit(self, reservation: Reservation, holder: Holder, now_s: float) -> None:
        """Count a running request with a reservation of its own at `holder`."""
        reservation.holder = holder
        self.open[reservation.id] = reservation
        self.begin(reservation.overrun, now_s)

    def begin(self, overrun: int, now_s: float) -> None:
        """Count a running request until `end`, and the overrun that it opens until `close`."""
        self.live += 1
        if self.has_slots:
            self._ends.stock(self.live, now_s)
        if overrun:
            self.open_overrun += overrun
            self._closed.stock(self.open_overrun, now_s)

    def close(self, overrun: int, now_s: float) -> None:
        """Close open overrun that was reserved or will not be used."""
        if overrun:
            self._closed.freed(overrun, now_s)
            self.open_overrun -= overrun
            self._closed.stock(self.open_overrun, now_s)

    def extend(self, reservation: Reservation, tokens: int, now_s: float) -> None:
        """Add `tokens` to the reservation of a running request."""
        tokens = min(max(0, tokens), reservation.overrun)
        reservation.tokens += tokens
        self.close(tokens, now_s)

    def reopen(self, reservation: Reservation, now_s: float) -> None:
        """Reduce a local reservation to its estimate, which Redis has granted."""
        self.open_overrun += reservation.tokens - reservation.estimate
        reservation.tokens = reservation.estimate
        self._closed.stock(self.open_overrun, now_s)

    def timed(self, denied: Denied, now_s: float, frontends: int) -> Denied:
        """Return `denied` with the time to wait.

        For a slot: until one of the account's requests ends at any frontend. For open overrun: until enough of it is
        closed, at the rate of this frontend times the number of frontends.
        """
        if denied.reason == "concurrency":
            wait_s = _expected(self._ends.wait_s(1, now_s))
        elif denied.reason == "overrun":
            wait_s = _expected(self._closed.wait_s(denied.overrun_excess, now_s))
        else:
            return denied
        return replace(denied, wait_s=max(END_WAIT_MIN_S, wait_s / frontends))

    def deny(self, denied: Denied, tokens: int, overrun: int, now_s: float, frontends: int) -> Denied:
        """Cache the denial of a request of `tokens` with open `overrun`; return it with the time to wait."""
        denied = self.timed(denied, now_s, frontends)
        self.denial_cache.put(denied, self.account, tokens, overrun, now_s)
        return denied

    def end(self, now_s: float) -> None:
        """Count the end of a running request."""
        self.live -= 1
        if self.has_slots:
            self._ends.freed(1, now_s)
            self._ends.stock(self.live, now_s)


class Holder(Enum):
    """Holder of a reservation."""

    NOBODY = auto()
    """No limit, or no reservation yet."""
    QUOTA_LEASE = auto()
    REDIS = auto()
    LOCAL = auto()


class Reservation:
    """The reservation of one request. The frontend calls `Budgets.progress` from `progress_at` on, and settles it once."""

    __slots__ = (
        *(
            "caller",
            "estimate",
            "holder",
            "id",
            "is_doubtful",
            "is_forced",
            "is_live",
            "is_settled",
            "max_tokens",
            "position",
        ),
        *("progress_at", "prompt_tokens", "quota_lease", "account_state", "tokens"),
    )

    def __init__(
        self,
        rid: str,
        caller: Caller,
        account_state: AccountState | None,
        prompt_tokens: int,
        output_tokens: int,
        max_tokens: int = 0,
    ) -> None:
        self.id = rid
        """Empty: no reservation was needed."""
        self.caller = caller
        self.account_state = account_state
        self.prompt_tokens = prompt_tokens
        """Tokens reserved for the prompt."""
        self.estimate = prompt_tokens + output_tokens
        """Tokens of the first reservation."""
        self.tokens = self.estimate
        """Tokens reserved by now."""
        self.max_tokens = max(self.estimate, max_tokens)
        """Maximum charge of the request, in tokens."""
        is_open = self.max_tokens > self.estimate
        self.progress_at = max(1, output_tokens - MARGIN_TOKENS) if is_open else output_tokens + 1
        """Output position from which `Budgets.progress` is to be called."""
        self.position = 0
        """Output tokens at the last call of `Budgets.progress`."""
        self.holder = Holder.NOBODY
        self.quota_lease: QuotaLease | None = None
        self.is_live = True
        """False once the slot is free."""
        self.is_settled = False
        self.is_forced = False
        self.is_doubtful = False
        """True if Redis may hold the reservation although it was admitted locally."""

    def __repr__(self) -> str:
        state = "settled" if self.is_settled else "live" if self.is_live else "ended"
        return f"Reservation({self.id}: {self.tokens} tokens, {self.holder.name.lower()}, {state})"

    @property
    def overrun(self) -> int:
        """Tokens that the request may be charged beyond its reservation by now."""
        return self.max_tokens - self.tokens

    @property
    def lacking(self) -> int:
        """Tokens to reserve now, so that the reservation is EXTEND_TOKENS ahead of the output, up to the maximum."""
        if not self.position:
            return 0
        return min(self.overrun, max(0, self.prompt_tokens + self.position + EXTEND_TOKENS - self.tokens))

    @property
    def remaining(self) -> RemainingBudget | None:
        """Remaining budget of the account in its tightest scope, as known here. None: no limit."""
        return None if self.account_state is None else self.account_state.remaining


def _expected(wait_s: float | None) -> float:
    return END_WAIT_S if wait_s is None else min(END_WAIT_MAX_S, max(END_WAIT_MIN_S, wait_s))
