"""The single writer of one Attach stream: the rows of its outbox leave as one message per write (batching).

Urgent rows are written at once. Lazy rows leave with them, or after the coalescing window of `LAZY_S`
(docs/decisions/0008).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from kvmesh.attach.outbox import DownwardOutbox, UpwardOutbox
from kvmesh.clock import Clock

LAZY_S: Final = 0.02
"""Coalescing window: the longest time that a lazy row stays in the outbox."""

WATCH_S: Final = 0.5


class OutboxStuck(Exception):
    """The outbox stayed full: the peer does not read."""


class Writer:
    """Owns the callbacks of the outbox. `run` and `watch` are tasks of the stream."""

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
        """Write until cancelled, or until the write in flight at `close` is done."""
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
        """Raise OutboxStuck once the outbox is stuck (see `Outbox.is_stuck`)."""
        while True:
            await asyncio.sleep(self._watch_s)
            if self._outbox.is_stuck(self._clock.now_s()):
                raise OutboxStuck(f"{self._outbox.waiting_bytes} bytes wait, and the peer does not read")

    def close(self) -> None:
        """Let `run` end after the write in flight. gRPC cannot send a status beside a write."""
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
