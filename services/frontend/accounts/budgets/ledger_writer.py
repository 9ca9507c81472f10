"""Tells Redis what it must know: who runs, what was settled, what was spent without it, what slabs need.

A shell. What was asked is asked again until it is answered; every operation is done once however often it is sent.
Settlements wait in memory while Redis is away, OWED_MAX of them; the oldest are dropped, whose reservations are then
settled at their estimate when their lease ends.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Final

from kvmesh.buckets.limits import Account
from kvmesh.buckets.operations import (
    TOKENS_MAX,
    Answer,
    Draw,
    Drawn,
    Lowered,
    Operation,
    Renew,
    Renewal,
    Renewed,
    Settle,
    Settled,
    Spend,
    Spent,
)
from kvmesh.clock import Clock
from services.frontend.accounts.budgets.account_state import AccountState, Holder, Reservation
from services.frontend.accounts.budgets.batcher import Batcher, BudgetOperation
from services.frontend.accounts.budgets.current_limits import CurrentLimits
from services.frontend.accounts.budgets.local_fallback import LocalFallback
from services.frontend.accounts.budgets.metrics import BudgetMetrics
from services.frontend.accounts.budgets.quota_lease import Ask, QuotaLease

LEASE_S: Final = 15.0
RENEW_S: Final = 5.0
OWED_MAX: Final = 65_536
RENEWALS_MAX: Final = 256
"""Renewals in one operation: a script blocks everybody."""


class LedgerWriter:
    """The way to Redis of all that nobody waits for. `boot_id` makes names unique."""

    def __init__(
        self, pump: Batcher, detour: LocalFallback, boot_id: str, clock: Clock, metrics: BudgetMetrics
    ) -> None:
        self.adopting: dict[str, Reservation] = {}
        """Admitted locally and not settled: Redis shall know of them."""
        self.frontends = 1
        self.newest = CurrentLimits()
        self._pump = pump
        self._detour = detour
        self._boot_id = boot_id
        self._clock = clock
        self._metrics = metrics
        self._names = itertools.count(1)
        self._renewed_at_s = clock.now_s()
        self._owed: deque[tuple[AccountState, Operation]] = deque()

    @property
    def owed_count(self) -> int:
        """Settlements that wait for Redis."""
        return len(self._owed)

    def account(self, standing: AccountState) -> Account:
        """Return the account of `standing` by the limits that hold now."""
        if standing.told_version != self.newest.version:
            standing.told_account = self.newest.of(standing.account)
            standing.told_version = self.newest.version
        return standing.told_account

    def name(self, what: str) -> str:
        """Return a name that nothing else has."""
        return f"{self._boot_id}-{what}-{next(self._names)}"

    def tell(self, standings: Iterable[AccountState]) -> None:
        """Tell what Redis missed. What is given back goes first, so that what was spent can be taken."""
        running: dict[AccountState, list[Reservation]] = {}
        for reservation in self.adopting.values():
            assert reservation.standing is not None
            running.setdefault(reservation.standing, []).append(reservation)
        for standing, reservations in running.items():
            self.renew(standing, reservations)
        owed, self._owed = self._owed, deque()
        for standing, operation in owed:
            self._put(standing, operation)
        for standing in standings:
            self._spend(standing)

    def owe(self, standing: AccountState, operation: Operation) -> None:
        """Have `operation` done, now or when Redis is back."""
        if not self._detour.is_on:
            self._put(standing, operation)
            return
        if len(self._owed) >= OWED_MAX:
            self._owed.popleft()
            self._metrics.dropped.value += 1
        self._owed.append((standing, operation))

    def settle(self, reservation: Reservation, actual: int, *, refund_request: bool) -> None:
        """Settle what Redis holds, or may hold, or shall be told in sum."""
        standing = reservation.standing
        assert standing is not None
        operation = Settle(self.account(standing), reservation.id, actual, refund_request)
        if reservation.holder is Holder.REDIS:
            self.owe(standing, operation)
            return
        self.adopting.pop(reservation.id, None)
        if reservation.is_doubtful:
            # Whether Redis has it or not: opened and settled it is charged once.
            self.owe(
                standing,
                Renew(self.account(standing), (Renewal(reservation.id, reservation.tokens),), LEASE_S),
            )
            self.owe(standing, operation)
        else:
            standing.spent_tokens += actual
            standing.spent_requests += not refund_request

    def adopted(self, reservation: Reservation) -> None:
        """Redis holds what was admitted locally."""
        reservation.holder, reservation.is_doubtful = Holder.REDIS, False
        self.adopting.pop(reservation.id, None)

    def is_renewal_due(self, now_s: float) -> bool:
        """Return whether all leases should be renewed now, once each RENEW_S."""
        if now_s - self._renewed_at_s < RENEW_S:
            return False
        self._renewed_at_s = now_s
        return True

    def renew(self, standing: AccountState, reservations: Iterable[Reservation]) -> None:
        """Renew leases; reserve what running streams are behind their estimates; let Redis know what it does not."""
        pairs = []
        for each in reservations:
            more = each.lacking
            each.is_doubtful = True  # until there is an answer
            renewal = Renewal(each.id, each.tokens, 1, int(each.is_live), more, each.overrun - more)
            pairs.append((each, renewal))
        for at in range(0, len(pairs), RENEWALS_MAX):
            part = pairs[at : at + RENEWALS_MAX]
            operation = Renew(self.account(standing), tuple(item for _, item in part), LEASE_S)
            self._pump.put(BudgetOperation(operation, partial(self._renewed, standing, part)))

    def draw(self, standing: AccountState, now_s: float) -> None:
        """Have the account's slab filled, renewed, or given back, whatever is due."""
        quota_lease = standing.quota_lease
        if quota_lease.is_over:
            used = quota_lease.used_tokens, quota_lease.used_requests
            self.owe(
                standing,
                Settle(self.account(standing), quota_lease.rid, used[0], used_requests=max(0, used[1])),
            )
            self._replace(standing, now_s)
            return
        is_away = self._detour.is_on
        if is_away and self._detour.outage.back_at_s is None:
            quota_lease.is_low = False
            return
        ask = quota_lease.draw(now_s, may_grow=not is_away)
        if ask is not None:
            operation = _draw(self.account(standing), quota_lease, ask)
            self._pump.put(BudgetOperation(operation, partial(self._drawn, standing, quota_lease)))

    def _renewed(
        self, standing: AccountState, pairs: list[tuple[Reservation, Renewal]], answer: Answer | None
    ) -> None:
        if not isinstance(answer, Renewed):
            return
        now_s = self._clock.now_s()
        standing.tell(answer.remaining, now_s)
        for reservation, item in pairs:
            if item.extra_tokens and not reservation.is_settled:
                self._metrics.extensions.value += 1
                standing.extend(reservation, item.tokens + item.extra_tokens - reservation.tokens, now_s)
            if reservation.holder is Holder.LOCAL and not reservation.is_settled:
                self.adopted(reservation)

    def _put(self, standing: AccountState, operation: Operation) -> None:
        question = BudgetOperation(operation, _ignore)
        question.take = partial(self._paid, standing, question)
        if standing.has_slots:  # somebody may wait for this one
            self._pump.put(question)
        else:
            self._pump.put_soon(question)

    def _paid(self, standing: AccountState, question: BudgetOperation, answer: Answer | None) -> None:
        if isinstance(answer, Settled | Renewed | Lowered):
            standing.tell(answer.remaining, self._clock.now_s())
        elif question.is_wrong:
            self._metrics.dropped.value += 1
        else:
            self.owe(standing, question.operation)

    def _spend(self, standing: AccountState) -> None:
        if standing.is_spending:
            return
        if standing.spending is None:
            if not (standing.spent_tokens or standing.spent_requests):
                return
            # Of a long outage more may be due than can be told at once.
            tokens, requests = min(TOKENS_MAX, standing.spent_tokens), standing.spent_requests
            standing.spending = Spend(self.account(standing), tokens, requests, self.name("spent"))
            standing.spent_tokens -= tokens
            standing.spent_requests = 0
        standing.is_spending = True
        self._pump.put(BudgetOperation(standing.spending, partial(self._spent, standing)))

    def _spent(self, standing: AccountState, answer: Answer | None) -> None:
        standing.is_spending = False
        if isinstance(answer, Spent):
            standing.spending = None
            standing.tell(answer.remaining, self._clock.now_s())

    def _drawn(self, standing: AccountState, quota_lease: QuotaLease, answer: Answer | None) -> None:
        if not isinstance(answer, Drawn):
            quota_lease.lost()
            return
        now_s = self._clock.now_s()
        standing.tell(answer.remaining, now_s)
        if answer.is_open:
            quota_lease.drawn(answer.tokens, answer.requests, answer.slots, answer.overrun)
            return
        quota_lease.lost()  # Redis says it was settled: what runs in it is charged by itself
        quota_lease.forfeit()
        self._replace(standing, now_s)

    def _replace(self, standing: AccountState, now_s: float) -> None:
        standing.quota_lease = QuotaLease(self.name("quota_lease"), standing.account, self.frontends, now_s)


def _draw(account: Account, quota_lease: QuotaLease, ask: Ask) -> Draw:
    return Draw(
        account,
        quota_lease.rid,
        ask.number,
        ask.used_tokens,
        ask.used_requests,
        ask.tokens,
        ask.requests,
        ask.slots,
        LEASE_S,
        ask.least_tokens,
        ask.least_slots,
        min(TOKENS_MAX, ask.overrun),
        min(TOKENS_MAX, ask.least_overrun),
    )


def _ignore(_: Answer | None) -> None:
    """Take an answer that tells nothing."""
