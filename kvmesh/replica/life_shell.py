"""The I/O around a replica's life: its timer, and the callback after each change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from kvmesh.clock import Clock
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.life_state import LifeState
from kvmesh.metrics import Metrics
from kvmesh.replica.life import ReplicaLife, order_of
from kvmesh.replica.quarantine_file import QuarantineFile
from kvmesh.timer import Timer

log = logging.getLogger(__name__)

CONTACT_S: Final = 1.0
"""Longest wait of a new replica for its first contact with the leader before it registers. A leader that drives no lives
then costs no lease that says `starting`."""


class LifeShell:
    """Owns the life of one replica. `close` it before the loop ends.

    `on_change` is called after each change of the life, on the event loop, except for its age.
    """

    def __init__(self, clock: Clock, on_change: Callable[[], None], quarantine: QuarantineFile) -> None:
        self.life = ReplicaLife(clock.now_s(), quarantine.read())
        self._quarantine = quarantine
        self._clock = clock
        self._on_change = on_change
        self._timer = Timer(self, clock, _log_bug)
        self._shown = self._facts()
        self._contact = asyncio.Event()

    def start(self, *, is_control_known: bool) -> None:
        """Begin. `is_control_known`: a control process has a lease."""
        self.life.start(self._clock.now_s(), is_control_known=is_control_known)
        self._settle()

    def on_engine(self, boot_id: str, *, is_control_known: bool) -> None:
        """Take the boot id of the engine."""
        self.life.on_engine(boot_id, self._clock.now_s(), is_control_known=is_control_known)
        self._settle()

    def on_leader(self, drives_lives: bool, message: pb.LifeOrder | None) -> None:
        """Take a message of a leader, with the order in it."""
        now_s = self._clock.now_s()
        self.life.on_leader(now_s, drives_lives=drives_lives)
        order = order_of(message) if message is not None else None
        if order is not None and not self.life.on_order(order, now_s):
            log.debug("an order is ignored", extra={"state": order.state.value, "life": repr(self.life)})
        self._settle()

    async def contact(self) -> None:
        """Return once it is settled whether a leader drives the life, or after CONTACT_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CONTACT_S):
                await self._contact.wait()

    def close(self) -> None:
        """Stop the timer."""
        self._timer.close()

    def export(self, metrics: Metrics) -> None:
        """Export the state, read at each scrape."""
        for state in LifeState:
            metrics.gauge(
                "replica_state",
                "1 for the state of the replica's life, 0 for the others.",
                partial(self._is_in, state),
                state=state.value,
            )

    # TimedCore.

    def next_wake_s(self) -> float | None:
        """See TimedCore."""
        return self.life.next_wake_s()

    def on_timer(self, now_s: float) -> None:
        """See TimedCore."""
        self.life.on_timer(now_s)
        self._settle()

    def _is_in(self, state: LifeState) -> float:
        return float(self.life.state is state)

    def _facts(self) -> tuple[object, ...]:
        life = self.life
        return life.view(), life.engine_boot_id, life.is_proved, life.is_self_served, life.package

    def _settle(self) -> None:
        """Report a change, and set the timer."""
        facts, life = self._facts(), self.life
        if life.has_contact:
            self._contact.set()
        if facts != self._shown:
            self._shown = facts
            log.info(
                "life of the replica",
                extra={
                    "state": life.state.value,
                    "engine_boot_id": life.engine_boot_id,
                    "proved": life.is_proved,
                    "self_served": life.is_self_served,
                    "why": life.reason,
                },
            )
            self._on_change()
            if life.state is LifeState.QUARANTINED:
                self._quarantine.write(
                    life.engine_boot_id
                )  # behind the change: a slow disk keeps nothing in service
        self._timer.update()


def _log_bug(error: Exception) -> None:
    log.error("bug in the life of the replica", exc_info=error)
