"""The output side of one stream, shared by its requests: each has at most one message waiting, and they take turns.

A message is written by a task of the stream. So a request that is cancelled during its write leaves no part of a message.
"""

from __future__ import annotations

import asyncio
from collections import deque

from kvmesh.call import Call


class StreamOutput:
    """See the module. INVARIANT: while a message waits, no later one is sent."""

    def __init__(self, call: Call[bytes, bytes]) -> None:
        self._call = call
        self._waiting: deque[tuple[bytes, asyncio.Future[None]]] = deque()
        self._writing: asyncio.Task[None] | None = None

    def try_write(self, message: bytes) -> bool:
        """Send `message` at once; False: it was not taken, see Call. Raises as the call's `write`."""
        return self._writing is None and self._call.try_write(message)

    async def write(self, message: bytes) -> None:
        """Send `message` in its turn, and return when the transport has taken it. Raises as the call's `write`.

        A write that is cancelled before its turn sends nothing.
        """
        if self.try_write(message):
            return
        taken = asyncio.get_running_loop().create_future()
        self._waiting.append((message, taken))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="kserve-output")
        await taken

    async def close(self) -> None:
        """End the writes."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait((self._writing,))

    async def _write(self) -> None:
        try:
            while self._waiting:
                message, taken = self._waiting.popleft()
                if taken.cancelled():
                    continue
                try:
                    await self._call.write(message)
                except Exception as error:  # noqa: BLE001  # it belongs to the request
                    if not taken.done():
                        taken.set_exception(error)
                else:
                    if not taken.done():
                        taken.set_result(None)
        finally:
            self._writing = None
            for _, taken in self._waiting:
                taken.cancel()
