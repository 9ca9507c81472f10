"""Dials for all links of a process: inside the allowed networks, and not too many at once. A shell."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from kvmesh.attach.dial_budget import DialBudget, Ticket
from kvmesh.clock import Clock
from kvmesh.metrics import Metrics
from kvmesh.trust.networks import KEY, Networks, host_of, ip_of

CONNECTIONS = 2
"""Of one attempt: a probe, and gRPC's own."""

RESOLVE_S = 2.0


class DialRefused(Exception):
    """The address may not be dialled; says why."""


class Dialer:
    """One for each process, shared by its links."""

    def __init__(self, clock: Clock, networks: Networks | None = None) -> None:
        self.refused_total = 0
        """Attempts at host names that resolve to nothing, or to no address inside the networks."""
        self._clock = clock
        self._networks = networks or Networks()
        self._budget = DialBudget(clock.now_s())
        self._turns: dict[int, asyncio.Future[None]] = {}
        """Who waits, by the number of its ticket."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting_count(self) -> int:
        """Attempts that wait for their turn."""
        return len(self._budget)

    async def turn(self, failures: int) -> None:
        """Return when an attempt that has failed so often may open its CONNECTIONS."""
        ticket = self._budget.ask(failures, CONNECTIONS)
        mine = self._turns[ticket.number] = asyncio.get_running_loop().create_future()
        self._grant()
        try:
            await mine
        except asyncio.CancelledError:
            self._withdraw(ticket, mine)
            raise
        finally:
            self._turns.pop(ticket.number, None)

    def give_back(self) -> None:
        """The second connection of an attempt was not opened."""
        self._budget.give_back(CONNECTIONS - 1)

    def may_look(self) -> bool:
        """Take one connection for a look at why an attempt failed, if no attempt waits for it."""
        return self._budget.try_take(self._clock.now_s())

    async def resolve(self, address: str) -> str:
        """Return the "host:port" to dial. Raises DialRefused.

        Where networks are set, a name is resolved here, and the first address inside them is dialled: gRPC would resolve
        it again, and perhaps to another one.
        """
        if fault := self._networks.fault(address):
            raise DialRefused(fault)
        host = host_of(address)
        if self._networks.is_any or ip_of(host) is not None:
            return address
        port = address.rpartition(":")[2]
        found: list[str] = []
        with suppress(OSError, TimeoutError, UnicodeError):
            async with asyncio.timeout(RESOLVE_S):
                loop = asyncio.get_running_loop()
                answers = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
                found = [str(answer[4][0]) for answer in answers]
        inside = self._networks.first_inside(found)
        if inside is None:
            self.refused_total += 1
            shown = ", ".join(found) or "nothing"
            raise DialRefused(f"{address} resolves to {shown}; an address inside {KEY} is needed")
        return f"[{inside}]:{port}" if ":" in inside else f"{inside}:{port}"

    def export(self, metrics: Metrics) -> None:
        """Export it, read at each scrape."""
        metrics.gauge(
            "waiting_dials", "New connections that wait for their turn.", lambda: self.waiting_count
        )
        metrics.total(
            "refused_names", "Dials of host names outside trust.networks.", lambda: self.refused_total
        )

    def _withdraw(self, ticket: Ticket, mine: asyncio.Future[None]) -> None:
        if mine.done() and not mine.cancelled():
            self._budget.give_back(CONNECTIONS)
        ticket.is_withdrawn = True
        self._grant()

    def _grant(self) -> None:
        """Wake the attempts whose turn it is, and come back when the next one has its turn."""
        for ticket in self._budget.due(self._clock.now_s()):
            turn = self._turns.get(ticket.number)
            if turn is not None and not turn.done():
                turn.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_s = self._budget.next_s()
        if next_s is not None:
            wait_s = max(0.001, next_s - self._clock.now_s())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._grant)
