"""Writes to the ledger in Redis: leases of running requests, settlements, local spending, and draws of quota leases.

A settlement or a spending is sent again until Redis answers it. Renewals and draws repeat anyway. Operations are
idempotent, so each takes effect once. Up to OWED_MAX settlements wait in memory while Redis is unavailable. Beyond that the
oldest is dropped. A sweep then settles its reservation at the reserved tokens when the lease ends.
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
from services.frontend.accounts.budgets.quota_lease import DrawRequest, QuotaLease

LEASE_S: Final = 15.0
RENEW_S: Final = 5.0
OWED_MAX: Final = 65_536
RENEWALS_MAX: Final = 256
"""Renewals in one operation. A script blocks all other clients of Redis."""


class LedgerWriter:
    """Sends the operations that no request waits for. `boot_id` makes names unique."""

    def __init__(
        self,
        batcher: Batcher,
        local_fallback: LocalFallback,
        boot_id: str,
        clock: Clock,
        metrics: BudgetMetrics,
    ) -> None:
        self.unrecorded: dict[str, Reservation] = {}
        """Reservations that were admitted locally and not settled, which Redis must record."""
        self.frontends = 1
        self.current_limits = CurrentLimits()
        self._batcher = batcher
        self._local_fallback = local_fallback
        self._boot_id = boot_id
        self._clock = clock
        self._metrics = metrics
        self._names = itertools.count(1)
        self._renewed_at_s = clock.now_s()
        self._owed: deque[tuple[AccountState, Operation]] = deque()

    @property
    def owed_count(self) -> int:
        """Number of settlements that wait for Redis."""
        return len(self._owed)

    def account(self, account_state: AccountState) -> Account:
        """Return the account of `account_state` with its current limits."""
        if account_state.limits_version != self.current_limits.version:
            account_state.current_account = self.current_limits.of(account_state.account)
            account_state.limits_version = self.current_limits.version
        return account_state.current_account

    def name(self, what: str) -> str:
        """Return a new unique name."""
        return f"{self._boot_id}-{what}-{next(self._names)}"

    def send_missed(self, account_states: Iterable[AccountState]) -> None:
        """Send all that Redis missed. Tokens that are given back go first, so that local spending can be taken."""
        running: dict[AccountState, list[Reservation]] = {}
        for reservation in self.unrecorded.values():
            assert reservation.account_state is not None
            running.setdefault(reservation.account_state, []).append(reservation)
        for account_state, reservations in running.items():
            self.renew(account_state, reservations)
        owed, self._owed = self._owed, deque()
        for account_state, operation in owed:
            self._put(account_state, operation)
        for account_state in account_states:
            self._spend(account_state)

    def owe(self, account_state: AccountState, operation: Operation) -> None:
        """Send `operation` now, or when Redis is back."""
        if not self._local_fallback.is_on:
            self._put(account_state, operation)
            return
        if len(self._owed) >= OWED_MAX:
            self._owed.popleft()
            self._metrics.dropped.value += 1
        self._owed.append((account_state, operation))

    def settle(self, reservation: Reservation, actual: int, *, refund_request: bool) -> None:
        """Settle a reservation: in Redis if Redis holds or may hold it, else by adding it to the local spending."""
        account_state = reservation.account_state
        assert account_state is not None
        operation = Settle(self.account(account_state), reservation.id, actual, refund_request)
        if reservation.holder is Holder.REDIS:
            self.owe(account_state, operation)
            return
        self.unrecorded.pop(reservation.id, None)
        if reservation.is_doubtful:
            # In doubt: opened and settled, the request is charged once, whether Redis knew of it or not.
            self.owe(
                account_state,
                Renew(self.account(account_state), (Renewal(reservation.id, reservation.tokens),), LEASE_S),
            )
            self.owe(account_state, operation)
        else:
            account_state.spent_tokens += actual
            account_state.spent_requests += not refund_request

    def recorded(self, reservation: Reservation) -> None:
        """Note that Redis holds a reservation that was admitted locally."""
        reservation.holder, reservation.is_doubtful = Holder.REDIS, False
        self.unrecorded.pop(reservation.id, None)

    def is_renewal_due(self, now_s: float) -> bool:
        """Return True once each RENEW_S, when all leases are to be renewed."""
        if now_s - self._renewed_at_s < RENEW_S:
            return False
        self._renewed_at_s = now_s
        return True

    def renew(self, account_state: AccountState, reservations: Iterable[Reservation]) -> None:
        """Renew leases, extend reservations of streams beyond their estimates, and record local admissions."""
        pairs = []
        for each in reservations:
            more = each.lacking
            each.is_doubtful = True  # until the answer
            renewal = Renewal(each.id, each.tokens, 1, int(each.is_live), more, each.overrun - more)
            pairs.append((each, renewal))
        for at in range(0, len(pairs), RENEWALS_MAX):
            part = pairs[at : at + RENEWALS_MAX]
            operation = Renew(self.account(account_state), tuple(item for _, item in part), LEASE_S)
            self._batcher.put(BudgetOperation(operation, partial(self._renewed, account_state, part)))

    def draw(self, account_state: AccountState, now_s: float) -> None:
        """Draw on the account's quota lease, renew it, or give it back, as is due."""
        quota_lease = account_state.quota_lease
        if quota_lease.is_over:
            used = quota_lease.used_tokens, quota_lease.used_requests
            self.owe(
                account_state,
                Settle(self.account(account_state), quota_lease.rid, used[0], used_requests=max(0, used[1])),
            )
            self._replace(account_state, now_s)
            return
        is_degraded = self._local_fallback.is_on
        if is_degraded and self._local_fallback.outage.back_at_s is None:
            quota_lease.is_low = False
            return
        ask = quota_lease.draw(now_s, may_grow=not is_degraded)
        if ask is not None:
            operation = _draw(self.account(account_state), quota_lease, ask)
            self._batcher.put(BudgetOperation(operation, partial(self._drawn, account_state, quota_lease)))

    def _renewed(
        self, account_state: AccountState, pairs: list[tuple[Reservation, Renewal]], answer: Answer | None
    ) -> None:
        if not isinstance(answer, Renewed):
            return
        now_s = self._clock.now_s()
        account_state.on_remaining(answer.remaining, now_s)
        for reservation, item in pairs:
            if item.extra_tokens and not reservation.is_settled:
                self._metrics.extensions.value += 1
                account_state.extend(reservation, item.tokens + item.extra_tokens - reservation.tokens, now_s)
            if reservation.holder is Holder.LOCAL and not reservation.is_settled:
                self.recorded(reservation)

    def _put(self, account_state: AccountState, operation: Operation) -> None:
        budget_operation = BudgetOperation(operation, _ignore)
        budget_operation.take = partial(self._paid, account_state, budget_operation)
        if account_state.has_slots:  # a refused request may wait for the slot
            self._batcher.put(budget_operation)
        else:
            self._batcher.put_soon(budget_operation)

    def _paid(
        self, account_state: AccountState, budget_operation: BudgetOperation, answer: Answer | None
    ) -> None:
        if isinstance(answer, Settled | Renewed | Lowered):
            account_state.on_remaining(answer.remaining, self._clock.now_s())
        elif budget_operation.is_invalid:
            self._metrics.dropped.value += 1
        else:
            self.owe(account_state, budget_operation.operation)

    def _spend(self, account_state: AccountState) -> None:
        if account_state.is_spending:
            return
        if account_state.spending is None:
            if not (account_state.spent_tokens or account_state.spent_requests):
                return
            # After a long outage the spending may exceed the maximum of one operation.
            tokens, requests = min(TOKENS_MAX, account_state.spent_tokens), account_state.spent_requests
            account_state.spending = Spend(self.account(account_state), tokens, requests, self.name("spent"))
            account_state.spent_tokens -= tokens
            account_state.spent_requests = 0
        account_state.is_spending = True
        self._batcher.put(BudgetOperation(account_state.spending, partial(self._spent, account_state)))

    def _spent(self, account_state: AccountState, answer: Answer | None) -> None:
        account_state.is_spending = False
        if isinstance(answer, Spent):
            account_state.spending = None
            account_state.on_remaining(answer.remaining, self._clock.now_s())

    def _drawn(self, account_state: AccountState, quota_lease: QuotaLease, answer: Answer | None) -> None:
        if not isinstance(answer, Drawn):
            quota_lease.lost()
            return
        now_s = self._clock.now_s()
        account_state.on_remaining(answer.remaining, now_s)
        if answer.is_open:
            quota_lease.drawn(answer.tokens, answer.requests, answer.slots, answer.overrun)
            return
        quota_lease.lost()  # Redis has settled the lease: its running requests are charged one by one
        quota_lease.forfeit()
        self._replace(account_state, now_s)

    def _replace(self, account_state: AccountState, now_s: float) -> None:
        account_state.quota_lease = QuotaLease(
            self.name("quota_lease"), account_state.account, self.frontends, now_s
        )


def _draw(account: Account, quota_lease: QuotaLease, ask: DrawRequest) -> Draw:
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
    """Ignore an answer."""
