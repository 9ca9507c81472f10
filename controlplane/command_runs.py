"""Runs the commands of operators for the services of a control process: checks, execution, refusals, audit."""

from __future__ import annotations

from typing import Any, Final

import grpc

from controlplane.actions import AppendEvent
from controlplane.command_queue import Author
from controlplane.core import NO_REDIS, NOT_LEADER, UNKNOWN, ControlCore, refused
from controlplane.loop import ControlLoop
from controlplane.operators import Prepared
from controlplane.rollouts.commands import CommandRefused
from kvmesh.call import GrpcCall
from kvmesh.clock import Clock
from kvmesh.errors import MeshError

RETRY_AFTER_S: Final = 1.0
"""Delay that a command without Redis is told to wait."""

UNVERIFIED: Final = "unverified operator"
"""Author of a call without a certificate. Without `[trust]` it came from this host."""

Context = grpc.aio.ServicerContext[Any, Any]


class CommandRuns:
    """See the module. Its methods raise MeshError."""

    def __init__(self, loop: ControlLoop, clock: Clock) -> None:
        self._loop = loop
        self._core: ControlCore = loop.core
        self._clock = clock

    async def run(self, prepared: Prepared, context: Context, *, is_trial: bool) -> None:
        """Run a command, or check it alone."""
        self.check_leads()
        author = self.author(context)
        try:
            self._check(prepared, author, is_trial=is_trial)
            if not is_trial:
                await self._loop.command(lambda ticket: prepared.command(ticket, author, self._core.library))
        except CommandRefused as error:
            raise self._refusal(error) from None
        except TimeoutError:
            raise MeshError(
                "STORE_UNAVAILABLE",
                "the result is unknown: Redis did not answer in time, and the command may still come into force",
                retry_after_s=RETRY_AFTER_S,
            ) from None

    def check_leads(self) -> None:
        """Raise MeshError unless this process leads. The error names the leader."""
        if not self._core.leads:
            raise self._not_leader()

    def author(self, context: Context) -> Author:
        """Return the caller, for the audit."""
        call = GrpcCall(context)
        return Author(", ".join(call.identities) or UNVERIFIED, call.peer)

    def _check(self, prepared: Prepared, author: Author, *, is_trial: bool) -> None:
        """Raise CommandRefused, with an entry in the audit unless it is a trial. The core audits what it decides."""
        try:
            prepared.run(self._clock.now_s(), self._core.library)
        except CommandRefused as error:
            if not is_trial:
                self._loop.store.append(
                    AppendEvent(
                        prepared.what, prepared.target, refused(str(error)), author.name, author.source
                    )
                )
                self._loop.touch()
            raise

    def _refusal(self, error: CommandRefused) -> MeshError:
        text = str(error)
        if text == NOT_LEADER:
            return self._not_leader()
        if text in (NO_REDIS, UNKNOWN):
            return MeshError("STORE_UNAVAILABLE", text, retry_after_s=RETRY_AFTER_S)
        return MeshError("CHANGE_REFUSED", text, {"can_force": str(error.can_force).lower()})

    def _not_leader(self) -> MeshError:
        address = self._loop.hint().leader_address
        where = f"the leader is at {address}" if address else "no leader is known now; try again"
        return MeshError(
            "NOT_LEADER", f"{NOT_LEADER}; {where}", {"leader_address": address} if address else {}
        )
