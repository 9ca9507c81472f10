"""Reports the output position of executions to Redis, in case their frontend is killed.

A killed execution settles nothing, and its reservation stays. A later execution of the request lowers that reservation to
the reported output beyond its own. Only requests with limits, and with a key or a resume token, have reports: one each
PROGRESS_TOKENS of output. A lost report lowers the charge by its tokens. The settlement of an execution removes its report.
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
"""Output tokens between two reports of an execution: the output of a killed execution that may go unrecorded."""

WAITING_MAX: Final = 65_536
BATCH_MAX: Final = 128
COALESCE_S: Final = 0.05
"""Coalescing window of reports."""


class ProgressReports:
    """Takes positions at any time and sends them to Redis while `run` runs."""

    def __init__(self, redis: RedisLink, mesh: str) -> None:
        self._redis = redis
        self._mesh = mesh
        self._waiting: dict[str, tuple[str, int]] = {}
        """Request and position, by owner."""
        self._ready = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request_id: str, owner: str, position: int) -> None:
        """Report that the execution `owner` gave its client all output below `position`."""
        if owner in self._waiting or len(self._waiting) < WAITING_MAX:
            self._waiting[owner] = request_id, position
            self._ready.set()

    def forget(self, owner: str) -> None:
        """Drop the unsent report of the execution `owner`, which is being settled."""
        self._waiting.pop(owner, None)

    async def run(self) -> None:
        """Send waiting reports until cancelled. A failure drops all waiting reports: later ones have higher positions."""
        await persist(self._send, "progress reports", pause_s=0.25, on_failure=self._waiting.clear)

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
