"""What a frontend knows of one account: its slab, its open reservations, what is left, why it was refused.

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
from services.frontend.accounts.budgets.quota_lease import QuotaLease

EXTEND_TOKENS: Final = 256
"""A stream that comes near the end of its estimate reserves so much ahead, again and again. So a sweep charges what the
streams of a dead frontend gave, and a debt is seen before it is used."""

MARGIN_TOKENS: Final = 64
"""So many tokens before the end of what is reserved: Redis answers meanwhile."""

MEMO_S: Final = 0.1
"""A denial answers for itself this long: what a crowd of refused requests would ask is known."""

CONCURRENCY_MEMO_S: Final = 0.02

END_WAIT_S: Final = 1.0
"""Guess of the time until a request of the account ends, until some have."""

END_WAIT_MIN_S: Final = 0.02
END_WAIT_MAX_S: Final = 60.0


class AccountState:
    """One account at one frontend."""

    __slots__ = (
        *(
            "_denied",
            "_denied_at_s",
            "_denied_overrun",
            "_denied_s_per_token",
            "_denied_tokens",
            "_denied_until_s",
        ),
        *("_closed", "_ends", "_remaining", "account", "burst", "has_slots", "has_tokens", "is_spending"),
        *("current_account", "limits_version"),
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
        """The same with the limits that held as of `limits_version`: see Newest."""
        self.limits_version = -1
        self.quota_lease = quota_lease
        self.live = 0
        """Requests that run here."""
        self.open_overrun = 0
        """Tokens that requests of here may be charged beyond what is reserved for them."""
        self.open: dict[str, Reservation] = {}
        """Reservations that are not settled, those from the slab apart."""
        self.spent_tokens = self.spent_requests = 0
        """Spent locally by requests that ended, not told to Redis yet."""
        self.spending: Spend | None = None
        """What is being told; again under the same name if nobody answers."""
        self.is_spending = False
        """True while Redis is being told."""
        self.seen_at_s = now_s
        self.remaining_at_s = float("-inf")
        """When Redis said what is left."""
        bursts = [
            (scope.limit.tokens_burst, scope.name) for scope in account.scopes if scope.limit.tokens_per_min
        ]
        self.burst = min(bursts, default=(float("inf"), ""))
        """Most tokens that can ever be reserved at once, and whose limit that is."""
        self.has_tokens = bool(bursts)
        """True if tokens are limited."""
        self.has_slots = any(scope.limit.concurrency for scope in account.scopes)
        """True if requests at a time are limited."""
        self._remaining = RemainingBudget()
        self._denied: Denied | None = None
        self._denied_at_s = self._denied_until_s = 0.0
        self._denied_tokens = self._denied_overrun = 0
        self._denied_s_per_token = 0.0
        self._closed = DrainRate(Stock.HELD)
        """How fast open overrun shrinks here, in tokens."""
        self._ends = DrainRate(Stock.HELD)
        """How fast requests end here; known where requests at a time are limited."""

    def __repr__(self) -> str:
        return f"AccountState({self.account.scopes[-1].name}: {self.live} live, {len(self.open)} open, {self.quota_lease})"

    @property
    def is_idle(self) -> bool:
        """True if nothing is held, owed or awaited here."""
        return not (self.live or self.open or self.owes or self.quota_lease.is_open)

    @property
    def owes(self) -> bool:
        """True if something was spent that Redis does not know."""
        return bool(self.spending or self.spent_tokens or self.spent_requests)

    @property
    def remaining(self) -> RemainingBudget:
        """What is left: what Redis last said, and what is free here."""
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
        """What Redis last said to be left; None: nothing yet."""
        return self._remaining if self.remaining_at_s > float("-inf") else None

    def on_remaining(self, remaining: RemainingBudget, now_s: float) -> None:
        """Take what Redis says to be left."""
        self._remaining = remaining
        self.remaining_at_s = now_s

    def admit(self, reservation: Reservation, holder: Holder, now_s: float) -> None:
        """Take a request that runs from now on and that `holder` knows by its own name."""
        reservation.holder = holder
        self.open[reservation.id] = reservation
        self.begin(reservation.overrun, now_s)

    def begin(self, overrun: int, now_s: float) -> None:
        """Count a request that runs from now on, until `end`, and the overrun that it opens, until `close`."""
        self.live += 1
        if self.has_slots:
            self._ends.stock(self.live, now_s)
        if overrun:
            self.open_overrun += overrun
            self._closed.stock(self.open_overrun, now_s)

    def close(self, overrun: int, now_s: float) -> None:
        """Count open overrun that was reserved, or will not be used any more."""
        if overrun:
            self._closed.freed(overrun, now_s)
            self.open_overrun -= overrun
            self._closed.stock(self.open_overrun, now_s)

    def extend(self, reservation: Reservation, tokens: int, now_s: float) -> None:
        """Count `tokens` that a running request has reserved besides."""
        tokens = min(max(0, tokens), reservation.overrun)
        reservation.tokens += tokens
        self.close(tokens, now_s)

    def reopen(self, reservation: Reservation, now_s: float) -> None:
        """Take back a reservation in full: Redis has granted the estimate."""
        self.open_overrun += reservation.tokens - reservation.estimate
        reservation.tokens = reservation.estimate
        self._closed.stock(self.open_overrun, now_s)

    def timed(self, denied: Denied, now_s: float, frontends: int) -> Denied:
        """Return `denied` with the time to wait.

        For a slot: until one of the account's requests ends somewhere. For open overrun: until as much of it as must be is
        closed, as fast as it closes here, on all frontends.
        """
        if denied.reason == "concurrency":
            wait_s = _expected(self._ends.wait_s(1, now_s))
        elif denied.reason == "overrun":
            wait_s = _expected(self._closed.wait_s(denied.overrun_excess, now_s))
        else:
            return denied
        return replace(denied, wait_s=max(END_WAIT_MIN_S, wait_s / frontends))

    def deny(self, denied: Denied, tokens: int, overrun: int, now_s: float, frontends: int) -> Denied:
        """Remember why a request of `tokens`, with so much open `overrun`, was refused; return it with the time to wait."""
        denied = self.timed(denied, now_s, frontends)
        wait_s = denied.wait_s or 0.0
        self._denied, self._denied_at_s = denied, now_s
        memo_s = CONCURRENCY_MEMO_S if denied.reason in ("concurrency", "overrun") else MEMO_S
        self._denied_until_s = now_s + min(wait_s, memo_s)
        self._denied_tokens, self._denied_overrun = tokens, overrun
        self._denied_s_per_token = 0.0
        if denied.reason == "tokens":  # who wants less waits less
            limits = (scope.limit for scope in self.account.scopes if scope.name == denied.scope)
            self._denied_s_per_token = 60 / next(limits).tokens_per_min
        return denied

    def known_denial(self, tokens: int, overrun: int, now_s: float) -> Denied | None:
        """Return why a request of `tokens` and `overrun` would be refused, if that is known from one just before."""
        denied = self._denied
        if denied is None or now_s >= self._denied_until_s:
            return None
        if denied.reason == "overrun" and overrun < self._denied_overrun:
            return None
        if denied.is_claimed and tokens > self._denied_tokens:
            return None  # it may be the one that they wait for
        wait_s = (denied.wait_s or 0.0) - (now_s - self._denied_at_s)
        if denied.reason == "tokens" and not denied.is_claimed:
            wait_s += (tokens - self._denied_tokens) * self._denied_s_per_token
        if wait_s <= 0:
            return None
        return replace(denied, wait_s=wait_s)

    def forget_denial(self) -> None:
        """Something came back: ask again."""
        self._denied = None

    def end(self, now_s: float) -> None:
        """Count a request that ended."""
        self.live -= 1
        if self.has_slots:
            self._ends.freed(1, now_s)
            self._ends.stock(self.live, now_s)


class Holder(Enum):
    """Who holds what a request was promised."""

    NOBODY = auto()
    """Nothing is limited, or nothing is reserved yet."""
    QUOTA_LEASE = auto()
    REDIS = auto()
    LOCAL = auto()


class Reservation:
    """One request's. Its frontend calls `Budgets.progress` from `progress_at` on, and settles it once."""

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
        """Empty: nothing was reserved."""
        self.caller = caller
        self.account_state = account_state
        self.prompt_tokens = prompt_tokens
        """Reserved for the prompt."""
        self.estimate = prompt_tokens + output_tokens
        """Reserved at first, tokens."""
        self.tokens = self.estimate
        """Reserved by now."""
        self.max_tokens = max(self.estimate, max_tokens)
        """The most that the request may be charged."""
        is_open = self.max_tokens > self.estimate
        self.progress_at = max(1, output_tokens - MARGIN_TOKENS) if is_open else output_tokens + 1
        """Output position from which `Budgets.progress` wants to be called."""
        self.position = 0
        """Output tokens, as it was last told."""
        self.holder = Holder.NOBODY
        self.quota_lease: QuotaLease | None = None
        self.is_live = True
        """False once its slot is given back."""
        self.is_settled = False
        self.is_forced = False
        self.is_doubtful = False
        """True if Redis may hold it although it was admitted locally."""

    def __repr__(self) -> str:
        state = "settled" if self.is_settled else "live" if self.is_live else "ended"
        return f"Reservation({self.id}: {self.tokens} tokens, {self.holder.name.lower()}, {state})"

    @property
    def overrun(self) -> int:
        """Tokens that the request may be charged beyond what it has reserved by now."""
        return self.max_tokens - self.tokens

    @property
    def lacking(self) -> int:
        """Tokens to reserve now: a stream is EXTEND_TOKENS ahead of its output as long as it may have so much."""
        if not self.position:
            return 0
        return min(self.overrun, max(0, self.prompt_tokens + self.position + EXTEND_TOKENS - self.tokens))

    @property
    def remaining(self) -> RemainingBudget | None:
        """What is left of the account in its tightest scope, as far as this frontend knows. None: nothing is limited."""
        return None if self.account_state is None else self.account_state.remaining


def _expected(wait_s: float | None) -> float:
    return END_WAIT_S if wait_s is None else min(END_WAIT_MAX_S, max(END_WAIT_MIN_S, wait_s))
