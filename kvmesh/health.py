"""The standard gRPC health service (grpc.health.v1), with List.

The servicer of grpcio-health-checking 1.81 has no List, and stubs with List need protobuf 7. It has two more faults. If one
of two watchers of a name leaves, the other gets no further changes (still so in 1.85). A watcher that reads nothing blocks
every change.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh import health_reason

ServingStatus = int
"""A value of HealthCheckResponse.ServingStatus."""

HEALTH_SERVICE: Final = "grpc.health.v1.Health"
_LENGTH_DELIMITED: Final = 2
_BYTE_BITS: Final = 7


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the stubs are untyped
    """Serves the health status of each service name. The empty name is the process."""

    def __init__(self) -> None:
        self.reason = ""
        """Reason why the process does not serve. It is sent with each Check."""
        self._statuses: dict[str, ServingStatus] = {}
        self._changed = asyncio.Condition()

    def register(self, server: grpc.aio.Server) -> None:
        """Add all three methods to `server`."""
        health_pb2_grpc.add_HealthServicer_to_server(self, server)
        listing = grpc.unary_unary_rpc_method_handler(
            self.List
        )  # bytes in and out: the stubs have no messages for it
        server.add_registered_method_handlers(HEALTH_SERVICE, {"List": listing})  # type: ignore[attr-defined]  # stubs lack it

    async def set(self, service: str, status: ServingStatus) -> None:
        """Change the status of `service`, and notify its watchers."""
        async with self._changed:
            self._statuses[service] = status
            self._changed.notify_all()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        """Return the status of one service. NOT_FOUND for an unknown name."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service; List has all names")
        if self.reason:
            context.set_trailing_metadata(health_reason.metadata(self.reason))
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Write the status of one service now and after each change, until the caller leaves."""
        sent: ServingStatus | None = None
        while True:
            async with self._changed:
                while self._status(request.service) == sent:
                    await self._changed.wait()
                sent = self._status(request.service)
            await context.write(health_pb2.HealthCheckResponse(status=sent))

    async def List(self, request: bytes, context: Any) -> bytes:
        """Return HealthListResponse {map<string, HealthCheckResponse> statuses = 1} as bytes."""
        return b"".join(
            _field(
                1,
                _field(1, name.encode())
                + _field(2, health_pb2.HealthCheckResponse(status=status).SerializeToString()),
            )
            for name, status in self._statuses.items()
        )

    def _status(self, service: str) -> ServingStatus:
        return self._statuses.get(service, int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN))


def _field(number: int, value: bytes) -> bytes:
    """Return a length-delimited field of the protobuf wire format (protobuf.dev/programming-guides/encoding)."""
    length, size = bytearray(), len(value)
    while size >> _BYTE_BITS:
        length.append((size & 0x7F) | 0x80)
        size >>= _BYTE_BITS
    length.append(size)
    return bytes([number << 3 | _LENGTH_DELIMITED]) + bytes(length) + value
