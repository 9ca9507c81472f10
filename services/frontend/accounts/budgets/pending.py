"""Requests that wait for Redis to answer their reservation.

INVARIANT: a request that is cancelled while it waits reserves nothing, whatever Redis answers later. In an outage the local
buckets decide all waiting requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from kvmesh.buckets.operations import Answer, Denied, Granted, Reserve, Settle
from kvmesh.clock import Clock
from kvmesh.errors import MeshError, internal
from services.frontend.accounts.budgets.account_state import AccountState, Holder, Reservation
from services.frontend.accounts.budgets.batcher import Batcher, BudgetOperation
from services.frontend.accounts.budgets.ledger_writer import LEASE_S, LedgerWriter
from services.frontend.accounts.budgets.local_fallback import LocalFallback
from services.frontend.accounts.budgets.metrics import BudgetMetrics
from services.frontend.accounts.budgets.redis_outage import RedisOutage
from services.frontend.accounts.budgets.refusals import denied_error


class _Waiting:
    """A request that waits for Redis."""

    __slots__ = ("account_state", "budget_operation", "future", "is_decided", "reservation")

    def __init__(self, reservation: Reservation, account_state: AccountState) -> None:
        self.reservation = reservation
        self.account_state = account_state
        self.future: asyncio.Future[Reservation | MeshError] = asyncio.get_running_loop().create_future()
        self.budget_operation: BudgetOperation | None = None
        self.is_decided = False
        """True if the request was admitted or refused without Redis."""


class PendingReservations:
    """The waiting requests. `give_back(reservation)` settles one that was admitted in the moment of its cancellation."""

    def __init__(
        self,
        batcher: Batcher,
        ledger_writer: LedgerWriter,
        local_fallback: LocalFallback,
        redis_outage: RedisOutage,
        clock: Clock,
        metrics: BudgetMetrics,
        give_back: Callable[[Reservation], None],
    ) -> None:
        self._batcher = batcher
        self._ledger_writer = ledger_writer
        self._local_fallback = local_fallback
        self._redis_outage = redis_outage
        self._clock = clock
        self._metrics = metrics
        self._give_back = give_back
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(self, reservation: Reservation, account_state: AccountState) -> Reservation | MeshError:
        """Return the reservation, with its holder, or the error that refuses it."""
        waiting = _Waiting(reservation, account_state)
        operation = Reserve(
            account_state.account,
            reservation.id,
            reservation.tokens,
            LEASE_S,
            force=reservation.is_forced,
            overrun=reservation.overrun,
        )
        waiting.budget_operation = BudgetOperation(
            operation, partial(self._reserved, waiting), waiting.future
        )
        self._waiting[reservation.id] = waiting
        self._batcher.put(waiting.budget_operation)
        try:
            return await waiting.future
        except asyncio.CancelledError:
            self._waiting.pop(reservation.id, None)
            if account_state.open.get(reservation.id) is reservation:
                self._metrics.abandoned.value += 1  # it was granted in the same moment
                self._give_back(reservation)
            raise

    def decide_all(self) -> None:
        """Decide all waiting requests locally: Redis is unavailable."""
        for waiting in list(self._waiting.values()):
            self._decide(waiting)

    def _reserved(self, waiting: _Waiting, answer: Answer | None) -> None:
        """Take the answer of Redis to a reserve."""
        reservation, account_state = waiting.reservation, waiting.account_state
        assert waiting.budget_operation is not None
        self._waiting.pop(reservation.id, None)
        now_s = self._clock.now_s()
        if isinstance(answer, Granted | Denied):
            account_state.on_remaining(answer.remaining, now_s)
        if waiting.is_decided:
            self._reserved_late(reservation, account_state, answer)
        elif waiting.future.done():
            if not isinstance(answer, Denied):  # its caller was cancelled
                self._metrics.abandoned.value += 1
                self._cancel(reservation, account_state)
        elif isinstance(answer, Granted):
            account_state.admit(reservation, Holder.REDIS, now_s)
            self._metrics.redis.value += 1
            self._local_fallback.hold(account_state)
            waiting.future.set_result(reservation)
        elif isinstance(answer, Denied):
            tokens, overrun = reservation.tokens, reservation.overrun
            denied = account_state.deny(answer, tokens, overrun, now_s, self._ledger_writer.frontends)
            waiting.future.set_result(denied_error(account_state.account, denied, tokens, overrun))
        elif waiting.budget_operation.is_invalid:
            waiting.future.set_result(internal())
        else:
            self._decide(waiting)

    def _reserved_late(
        self, reservation: Reservation, account_state: AccountState, answer: Answer | None
    ) -> None:
        """Take the answer of Redis for a request that was decided without it."""
        if reservation.holder is not Holder.LOCAL:
            if not isinstance(answer, Denied):  # it was refused
                self._cancel(reservation, account_state)
        elif isinstance(answer, Denied):
            reservation.is_doubtful = False
        elif isinstance(answer, Granted) and not reservation.is_settled:
            now_s = self._clock.now_s()
            self._ledger_writer.recorded(reservation)
            self._local_fallback.give_back(account_state, reservation.tokens, 1, now_s)
            account_state.reopen(reservation, now_s)

    def _cancel(self, reservation: Reservation, account_state: AccountState) -> None:
        """Make Redis take back a reservation that has no request."""
        account = self._ledger_writer.account(account_state)
        self._ledger_writer.owe(account_state, Settle(account, reservation.id, 0, refund_request=True))

    def _decide(self, waiting: _Waiting) -> None:
        self._waiting.pop(waiting.reservation.id, None)
        if waiting.future.done():
            return
        assert waiting.budget_operation is not None
        waiting.is_decided = True
        waiting.reservation.is_doubtful = waiting.budget_operation.is_sent
        now_s = self._clock.now_s()
        self._redis_outage.begin(now_s)
        waiting.future.set_result(
            self._redis_outage.decide(waiting.reservation, waiting.account_state, now_s)
        )
