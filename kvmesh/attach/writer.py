"""The single writer of one Attach stream: what its outbox collects leaves as one message per write.

A shell. Rows that somebody waits for are written at once; the others ride along, or go after `LAZY_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from kvmesh.attach.outbox import DownwardOutbox, UpwardOutbox
from kvmesh.clock import Clock

LAZY_S: Final = 0.02
"""Longest a row that nobody waits for stays in the outbox."""

WATCH_S: Final = 0.5


class OutboxStuck(Exception):
    """The peer reads no more: its outbox stayed full."""


class Writer:
    """Owns the outbox's callbacks. Run `run` and `watch` as tasks of the stream."""

    def __init__(
        self,
        write: Callable[[Any], Awaitable[None]],
        outbox: UpwardOutbox | DownwardOutbox,
        clock: Clock,
        *,
        watch_s: float = WATCH_S,
    ) -> None:
        self._write = write
        self._outbox = outbox
        self._clock = clock
        self._watch_s = watch_s
        self._ready = asyncio.Event()
        self._ready.set()  # hello waits already
        self._later: asyncio.TimerHandle | None = None
        self._is_closing = False
        outbox.on_ready = self._ready.set
        outbox.on_lazy = self._wake_later

    async def run(self) -> None:
        """Write until cancelled, or until `close` and the write in flight is done."""
        outbox, ready = self._outbox, self._ready
        try:
            while not self._is_closing:
                await ready.wait()
                ready.clear()
                message = outbox.take(self._clock.now_s())
                if message is None:
                    continue
                await self._write(message)
                if outbox.is_urgent:
                    ready.set()
        finally:
            outbox.on_ready = outbox.on_lazy = _nothing
            if self._later is not None:
                self._later.cancel()

    async def watch(self) -> None:
        """Raise OutboxStuck once the outbox has stayed full."""
        while True:
            await asyncio.sleep(self._watch_s)
            if self._outbox.is_stuck(self._clock.now_s()):
                raise OutboxStuck(f"{self._outbox.waiting_bytes} bytes wait for a peer that does not read")

    def close(self) -> None:
        """Let `run` end after the write in flight: a status cannot be sent beside it."""
        self._is_closing = True
        self._ready.set()

    def _wake_later(self) -> None:
        if self._later is None:
            self._later = asyncio.get_running_loop().call_later(LAZY_S, self._wake)

    def _wake(self) -> None:
        self._later = None
        self._ready.set()


def _nothing() -> None:
    return None
