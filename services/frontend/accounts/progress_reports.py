"""How far executions have come that a client may begin again: told to Redis, in case their frontend is killed.

A shell. An execution that is killed reports nothing, and its reservation stays. A later execution of the same request
lowers that reservation to what the client had been given beyond the later one's output, which the note tells. One note each
NOTE_TOKENS, of requests with a key or a resume token alone. A note that is lost makes the charge as much smaller. The note
of an execution that reports is never read; the report removes it.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Final

from kvmesh.redis_link import RedisLink
from kvmesh.redis_script import Call, Script
from kvmesh.tasks import persist
from services.frontend.accounts.executions import execution_key

_REPORT_PROGRESS: Final = Script.beside(__file__, "report_progress.lua")

PROGRESS_TOKENS: Final = 256
"""Output tokens from one note of an execution to the next: what a killed one may have given without a trace."""

WAITING_MAX: Final = 65_536
BATCH_MAX: Final = 128
COALESCE_S: Final = 0.05
"""Notes of so long travel together."""


class ProgressReports:
    """Takes positions at any time and tells Redis while `run` runs."""

    def __init__(self, redis: RedisLink, mesh: str) -> None:
        self._redis = redis
        self._mesh = mesh
        self._waiting: dict[str, tuple[str, int]] = {}
        """By owner: request and position."""
        self._ready = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request_id: str, owner: str, position: int) -> None:
        """Tell that the execution `owner` gave its client everything below `position`."""
        if owner in self._waiting or len(self._waiting) < WAITING_MAX:
            self._waiting[owner] = request_id, position
            self._ready.set()

    def forget(self, owner: str) -> None:
        """The execution `owner` reports: what was not told of it yet would be of no use."""
        self._waiting.pop(owner, None)

    async def run(self) -> None:
        """Tell what waits, until cancelled. What Redis does not take is dropped: a later note says more."""
        await persist(self._send, "progress notes", pause_s=0.25, on_failure=self._waiting.clear)

    async def _send(self) -> None:
        while True:
            await self._ready.wait()
            await asyncio.sleep(COALESCE_S)
            batch = dict(islice(self._waiting.items(), BATCH_MAX))
            await self._redis.scripts(
                _REPORT_PROGRESS, [self._call(owner, *note) for owner, note in batch.items()]
            )
            for owner, note in batch.items():
                if self._waiting.get(owner) == note:
                    del self._waiting[owner]
            if not self._waiting:
                self._ready.clear()

    def _call(self, owner: str, request_id: str, position: int) -> Call:
        return (execution_key(self._mesh, request_id),), (owner, position)
