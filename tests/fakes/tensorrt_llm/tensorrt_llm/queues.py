"""Queues between TensorRT-LLM's threads and the event loop: llmapi/utils.py@03dd9bb8, AsyncQueue and _SyncQueue.

Their costs are part of the engine's cost for each token. Items are put without a wake-up. One coroutine in the event loop
then wakes all queues of an iteration.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class ResultQueue:
    """The queue of one request, made in the event loop that reads it."""

    loop: asyncio.AbstractEventLoop
    _items: deque[Any] = field(default_factory=deque)
    _event: asyncio.Event = field(default_factory=asyncio.Event)

    def put_nowait(self, item: Any) -> None:
        """Put an item without waking the reader. Any thread."""
        self._items.append(item)

    def notify(self) -> None:
        """Wake the reader. Event loop only."""
        if self._items:
            self._event.set()

    def empty(self) -> bool:
        """Return whether no item waits."""
        return not self._items

    async def get(self, timeout: float | None = None) -> Any:
        """Return the next item. With a timeout of 0 an empty queue raises asyncio.QueueEmpty at once."""
        while not self._items:
            if timeout is None:
                await self._event.wait()
            elif timeout <= 0:
                raise asyncio.QueueEmpty
            else:
                await asyncio.wait_for(self._event.wait(), timeout)
        item = self._items.popleft()
        if not self._items:
            self._event.clear()
        return item


async def _notify(queues: Iterable[ResultQueue]) -> None:
    for queue in queues:
        queue.notify()


def notify_many(queues: list[ResultQueue]) -> None:
    """Wake the readers of all queues in one turn of their event loop. Any thread."""
    loop = queues[0].loop
    if loop.is_running():
        asyncio.run_coroutine_threadsafe(_notify(frozenset(queues)), loop)
