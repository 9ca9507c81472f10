"""Queue of dials that wait for connections from one token bucket. `dial_budget` decides their order and time."""

from __future__ import annotations

import asyncio

from kvmesh.attach.dial_budget import DialBudget, DialTicket
from kvmesh.clock import Clock

CONNECTIONS = 2
"""Connections of one attempt: the probe, and the connection of gRPC."""


class DialQueue:
    """Attempts in the order of the budget. Each starts once it has its CONNECTIONS."""

    def __init__(self, clock: Clock, budget: DialBudget) -> None:
        self._clock = clock
        self._budget = budget
        self._waiters: dict[int, asyncio.Future[None]] = {}
        """Futures of the waiting attempts, by ticket number."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._budget)

    async def acquire(self, dials: int) -> None:
        """Wait until an attempt may open its CONNECTIONS, to a peer dialled `dials` times since its last steady stream."""
        ticket = self._budget.enqueue(dials, CONNECTIONS)
        waiter = self._waiters[ticket.number] = asyncio.get_running_loop().create_future()
        self._grant()
        try:
            await waiter
        except asyncio.CancelledError:
            self._withdraw(ticket, waiter)
            raise
        finally:
            self._waiters.pop(ticket.number, None)

    def refund(self) -> None:
        """Return the second connection of an attempt, which was not opened."""
        self._budget.refund(CONNECTIONS - 1)
        self._grant()

    def try_acquire(self) -> bool:
        """Take one connection for the diagnosis of a failed attempt, unless an attempt waits for it."""
        return self._budget.try_take(self._clock.now_s())

    def _withdraw(self, ticket: DialTicket, waiter: asyncio.Future[None]) -> None:
        if waiter.done() and not waiter.cancelled():
            self._budget.refund(CONNECTIONS)
        ticket.is_withdrawn = True
        self._grant()

    def _grant(self) -> None:
        """Wake the attempts that are granted, and set the timer for the next one."""
        for ticket in self._budget.due(self._clock.now_s()):
            waiter = self._waiters.get(ticket.number)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_s = self._budget.next_s()
        if next_s is not None:
            wait_s = max(0.001, next_s - self._clock.now_s())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._grant)
