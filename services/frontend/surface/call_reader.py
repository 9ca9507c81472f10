"""Reads a call: first its caller, from metadata and certificate, then its message, in the order of fair queuing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias, TypeVar

from kvmesh.call import Call, CallHead
from kvmesh.fair_queue import Path
from kvmesh.request_reader import RequestReader, no_message
from kvmesh.tenants.caller import Caller

METHOD: Final = "Generate"

T = TypeVar("T")

Identify: TypeAlias = Callable[[CallHead], Caller]


class CallReader:
    """Reads the calls of clients. `identify` returns the caller of a call, or raises MeshError."""

    def __init__(self, identify: Identify, reader: RequestReader) -> None:
        self.caller = identify
        """Returns the caller of a call, or raises MeshError."""
        self._reader = reader

    @property
    def late_total(self) -> int:
        """Messages that did not arrive in time."""
        return self._reader.late_total

    async def message(self, call: Call[bytes, Any], caller: Caller, method: str = METHOD) -> bytes:
        """Return the next message of `call`. Raises MeshError if no message comes, or none in time."""
        data = await self.read(call.read, call, caller)
        if data is None:
            raise no_message(method)
        return data

    async def read(self, read: Callable[[], Awaitable[T]], call: CallHead, caller: Caller) -> T:
        """Return what `read` returns, in the turn of `call`. Raises MeshError if it takes too long."""
        return await self._reader.message(read, _path(caller, call))


def _path(caller: Caller, call: CallHead) -> Path:
    """Return the flows in which `call` is queued: its tenant, if it has one, and its connection."""
    return (caller.tenant.name, call.peer) if caller.tenant.name else (call.peer,)
