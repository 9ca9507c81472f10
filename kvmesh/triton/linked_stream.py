"""A long stream to a Triton server on the batched transport, with a connection of its own.

grpc.aio wakes a thread and the loop for each message. A step stream and the event streams are most messages of a replica.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2

from kvmesh.http2.client import LinkChannel
from kvmesh.http2.connection import ConnectionLimits
from kvmesh.triton import errors
from kvmesh.triton.errors import EngineLost

METHOD: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
KEEPALIVE_S: Final = 3600.0
"""tritonserver drops a client that pings more often than every 5 minutes. Load reports show whether an engine lives."""
CONNECT_S: Final = 2.0
"""Longest time for the connection and for the server's answer to its settings."""


class LinkedStream:
    """One call of ModelStreamInfer, with the methods of grpc.aio's call that the client uses. `cancel` it in every case."""

    def __init__(self, address: str, message_bytes_max: int) -> None:
        limits = ConnectionLimits(keepalive_s=KEEPALIVE_S, handshake_s=CONNECT_S)
        self._channel = LinkChannel(address, None, message_bytes_max=message_bytes_max, limits=limits)
        self._call = self._channel.stream_stream(
            METHOD,
            service_pb2.ModelInferRequest.SerializeToString,
            service_pb2.ModelStreamInferResponse.FromString,
        )()
        self._is_dropped = False

    async def write(self, request: Any) -> None:
        """Write one request. The error of a broken stream is raised by `read`."""
        with suppress(grpc.aio.UsageError):
            await self._call.write(request)

    async def done_writing(self) -> None:
        """Tell the server that no request follows."""
        with suppress(grpc.aio.UsageError):
            await self._call.done_writing()

    async def read(self) -> Any:
        """Return the next ModelStreamInferResponse, or grpc's EOF. Raises CallError, or CancelledError after `cancel`."""
        message = await self._call.read()
        if message is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs left it out
            return message
        self._channel.abort()
        if self._is_dropped:
            raise EngineLost("the channel was closed under the stream")
        code = await self._call.code()
        if code is not grpc.StatusCode.OK:
            raise errors.of_status(code, await self._call.details())
        return message

    def cancel(self) -> None:
        """End the call and its connection."""
        self._call.cancel()
        self._channel.abort()

    def drop(self) -> None:
        """Close the connection. A read then raises EngineLost."""
        self._is_dropped = True
        self._channel.abort()
