"""A client of ADS without a load balancer behind it: subscribes to all four types, and acknowledges each answer."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc

from controlplane.xds.resource_set import ENDPOINTS, TYPES
from controlplane.xds.schema import Schema
from controlplane.xds.server import METHOD, SERVICE_NAME

PATH: Final = f"/{SERVICE_NAME}/{METHOD}"


class AdsClient:
    """One stream. `run` reads it until it ends."""

    def __init__(self, schema: Schema, name: str, region: str) -> None:
        """Set up a client of `region` without I/O. `name`: the listener."""
        self.versions: dict[str, str] = {}
        """Version of the latest answer, by type."""
        self.resources: dict[str, list[Any]] = {}
        """Resources of the latest answer, by type."""
        self._schema = schema
        self._request: Any = schema.message("envoy.service.discovery.v3.DiscoveryRequest")
        self._response: Any = schema.message("envoy.service.discovery.v3.DiscoveryResponse")
        self._name = name
        self._node = {"id": "bench", "locality": {"region": region}}
        self._news = asyncio.Event()

    async def run(self, channel: grpc.aio.Channel) -> None:
        """Subscribe, read and acknowledge until the stream ends. Raises grpc.RpcError."""
        method: Any = channel.stream_stream(PATH, self._request.SerializeToString, self._response.FromString)
        call = method()
        for kind in TYPES:
            await call.write(self._request(type_url=kind, resource_names=[self._name], node=self._node))
        while (answer := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
            self.versions[answer.type_url] = answer.version_info
            self.resources[answer.type_url] = [self._schema.unpack(each) for each in answer.resources]
            await call.write(
                self._request(
                    type_url=answer.type_url,
                    resource_names=[self._name],
                    version_info=answer.version_info,
                    response_nonce=answer.nonce,
                )
            )
            self._news.set()

    async def news(self) -> None:
        """Wait for an answer since the last call."""
        await self._news.wait()
        self._news.clear()

    def endpoints(self) -> list[tuple[str, dict[str, int]]]:
        """Return each locality by priority: its region, and the health status of its addresses."""
        (assignment,) = self.resources.get(ENDPOINTS) or [self._schema.build(_ASSIGNMENT, {})]
        localities = sorted(assignment.endpoints, key=lambda each: each.priority)
        return [(each.locality.region, dict(map(_endpoint, each.lb_endpoints))) for each in localities]


_ASSIGNMENT: Final = "envoy.config.endpoint.v3.ClusterLoadAssignment"


def _endpoint(one: Any) -> tuple[str, int]:
    socket = one.endpoint.address.socket_address
    return f"{socket.address}:{socket.port_value}", one.health_status
