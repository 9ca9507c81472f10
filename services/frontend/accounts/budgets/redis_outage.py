"""The circuit breaker of budgets: local buckets admit while Redis is unavailable, and Redis records it afterwards.

`LocalFallback` decides. Half-open: one probe each tick of the maintenance tests Redis.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvmesh.buckets.operations import Answer, Sweep
from kvmesh.clock import Clock
from kvmesh.errors import MeshError
from services.frontend.accounts.budgets.account_state import AccountState, Holder, Reservation
from services.frontend.accounts.budgets.account_states import AccountStates
from services.frontend.accounts.budgets.batcher import Batcher, BudgetOperation
from services.frontend.accounts.budgets.ledger_writer import LedgerWriter
from services.frontend.accounts.budgets.local_fallback import LocalFallback
from services.frontend.accounts.budgets.metrics import BudgetMetrics


class RedisOutage:
    """An outage of Redis: from `begin` until Redis has been back for long enough."""

    def __init__(
        self,
        local_fallback: LocalFallback,
        batcher: Batcher,
        ledger_writer: LedgerWriter,
        account_states: AccountStates,
        clock: Clock,
        metrics: BudgetMetrics,
    ) -> None:
        self._local_fallback = local_fallback
        self._batcher = batcher
        self._ledger_writer = ledger_writer
        self._account_states = account_states
        self._clock = clock
        self._metrics = metrics

    def begin(self, now_s: float) -> None:
        """Open the circuit: Redis is unavailable. May be called again during the outage."""
        self._local_fallback.begin(self._account_states, now_s)

    def decide(
        self, reservation: Reservation, account_state: AccountState, now_s: float
    ) -> Reservation | MeshError:
        """Admit or refuse a request locally. When Redis is back, it gets a record of the admission."""
        error = self._local_fallback.admit(reservation, now_s)
        if error is not None:
            return error
        account_state.admit(reservation, Holder.LOCAL, now_s)
        self._metrics.local.value += 1
        self._ledger_writer.unrecorded[reservation.id] = reservation
        return reservation

    def answered(self) -> None:
        """Note an answer of Redis."""
        self._local_fallback.outage.answer(self._clock.now_s())

    def probe(self, now_s: float, on_end: Callable[[float], None]) -> None:
        """Probe Redis. Once Redis answers, send all that it missed; close the circuit when `Outage.may_end` allows it.

        Then `on_end(now_s)` is called. It records the last local admissions before Redis is asked for the next request.
        """
        if self._local_fallback.outage.back_at_s is not None:
            if self._ledger_writer.is_renewal_due(now_s):  # leases ran during the outage
                for account_state in self._account_states:
                    self._ledger_writer.renew(account_state, account_state.open.values())
                    self._ledger_writer.draw(account_state, now_s)
            self._ledger_writer.send_missed(self._account_states)
        organisation = next(iter(self._account_states.organisations()), "-")
        self._batcher.put(BudgetOperation(Sweep(organisation, 1), partial(self._probed, on_end)))

    def _probed(self, on_end: Callable[[float], None], answer: Answer | None) -> None:
        now_s = self._clock.now_s()
        if answer is None or not self._local_fallback.outage.may_end(now_s):
            return
        self._local_fallback.end()
        for account_state in self._account_states:
            account_state.denial_cache.clear()
        on_end(now_s)
