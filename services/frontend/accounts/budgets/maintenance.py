"""Periodic maintenance of budgets: draws on quota leases, renewals, missed operations, sweeps, and idle accounts."""

from __future__ import annotations

import asyncio
from typing import Final

from kvmesh.buckets.operations import Answer, Sweep
from kvmesh.clock import Clock
from kvmesh.tasks import persist
from services.frontend.accounts.budgets.account_states import AccountStates
from services.frontend.accounts.budgets.batcher import Batcher, BudgetOperation
from services.frontend.accounts.budgets.ledger_writer import LedgerWriter
from services.frontend.accounts.budgets.local_fallback import LocalFallback
from services.frontend.accounts.budgets.pending import PendingReservations
from services.frontend.accounts.budgets.redis_outage import RedisOutage

TICK_S: Final = 0.25
"""Time between two rounds, and between two probes of an unavailable Redis."""


class Maintenance:
    """See the module."""

    def __init__(
        self,
        batcher: Batcher,
        ledger_writer: LedgerWriter,
        local_fallback: LocalFallback,
        redis_outage: RedisOutage,
        pending: PendingReservations,
        account_states: AccountStates,
        clock: Clock,
    ) -> None:
        self._batcher = batcher
        self._ledger_writer = ledger_writer
        self._local_fallback = local_fallback
        self._redis_outage = redis_outage
        self._pending = pending
        self._account_states = account_states
        self._clock = clock

    async def run(self) -> None:
        """Run a round each TICK_S until cancelled. No answer of Redis ends it."""
        await persist(self._run, "budgets", pause_s=TICK_S)

    async def flush(self, timeout_s: float) -> bool:
        """See `Budgets.flush`."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    for account_state in self._account_states:
                        account_state.quota_lease.cool()
                    self._tick(self._clock.now_s())
                    await self._batcher.drained()
                    if not self._is_telling:
                        return True
                    await asyncio.sleep(TICK_S / 10)
        except TimeoutError:
            return False

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._tick(self._clock.now_s())

    def _tick(self, now_s: float) -> None:
        if self._local_fallback.is_on:
            if not self._batcher.is_busy:
                self._redis_outage.probe(now_s, self._tick)
            return
        self._ledger_writer.send_missed(self._account_states)
        is_due = self._ledger_writer.is_renewal_due(now_s)
        for account_state in self._account_states:
            self._ledger_writer.draw(account_state, now_s)
            if is_due:
                self._ledger_writer.renew(account_state, account_state.open.values())
        if is_due:
            self._account_states.forget_idle(now_s)
            for organisation in self._account_states.organisations():
                self._batcher.put(BudgetOperation(Sweep(organisation), _ignore))

    @property
    def _is_telling(self) -> bool:
        """True if an operation still waits for Redis."""
        return bool(
            self._local_fallback.is_on
            or self._ledger_writer.owed_count
            or self._ledger_writer.unrecorded
            or len(self._pending)
            or any(each.owes or each.quota_lease.is_holding for each in self._account_states)
        )


def _ignore(_: Answer | None) -> None:
    """Ignore an answer."""
