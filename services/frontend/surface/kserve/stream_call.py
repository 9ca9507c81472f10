"""The call of a stream of requests: it can wait for a message without reading it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from kvmesh.call import GrpcCall


class StreamCall(GrpcCall):
    """A GrpcCall with `arrives`."""

    __slots__ = ("_arrives", "_next")

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        super().__init__(context)
        self._arrives: Callable[[], Awaitable[bool]] | None = getattr(context, "arrives", None)
        """The batched transport has it. grpc.aio has none, so there a message is read while it is waited for."""
        self._next: bytes | None = None

    async def arrives(self) -> bool:
        """Return True once a message arrives; False: the client half-closed. May wait for any time."""
        if self._arrives is not None:
            return await self._arrives()
        self._next = await super().read()
        return self._next is not None

    async def read(self) -> Any:
        """See Call."""
        if self._next is None:
            return await super().read()
        found, self._next = self._next, None
        return found
