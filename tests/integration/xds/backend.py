"""Frontends of one region as small gRPC servers in one process, which may be killed or frozen: `python -m ...backend`.

Each says its name, and streams it. Their options are those of a frontend's server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import grpc

from bench import control
from controlplane.xds.resources import REGION_HEADER
from kvmesh.server import SERVER_OPTIONS
from tests.integration.xds.client import SERVICE

EVERY_S: Final = 0.02
"""Time between two messages of a stream."""

GRACE_S: Final = 30.0


class Backend:
    """One server."""

    def __init__(self, name: str) -> None:
        self._name = name.encode()
        self._grpc = grpc.aio.server(options=SERVER_OPTIONS)
        self._grpc.add_registered_method_handlers(  # type: ignore[attr-defined]  # not in the stubs
            SERVICE,
            {
                "Name": grpc.unary_unary_rpc_method_handler(self._say),
                "Region": grpc.unary_unary_rpc_method_handler(self._region),
                "Stream": grpc.unary_stream_rpc_method_handler(self._stream),
            },
        )
        self._stopping: asyncio.Task[None] | None = None

    async def start(self, address: str) -> str:
        """Listen, and return the address."""
        port = self._grpc.add_insecure_port(address)
        await self._grpc.start()
        return f"{address.rpartition(':')[0]}:{port}"

    def close_listener(self) -> None:
        """Accept no connection and no call from now on; running streams go on."""
        self._stopping = asyncio.create_task(self._grpc.stop(GRACE_S))

    async def _say(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return self._name

    async def _region(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        """Return the caller's region, as the headers of the call say."""
        found = dict(context.invocation_metadata() or ()).get(REGION_HEADER, "")
        return found if isinstance(found, bytes) else found.encode()

    async def _stream(
        self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        for _ in range(int(request)):
            yield self._name
            await asyncio.sleep(EVERY_S)


async def serve(region: str, addresses: str) -> None:
    """Serve at each of `addresses`, joined by commas, until stdin ends."""
    backends = [Backend(f"{region}-{number}") for number in range(len(addresses.split(",")))]
    found = [await one.start(address) for one, address in zip(backends, addresses.split(","), strict=True)]

    async def close_listeners() -> Mapping[str, Any]:
        for one in backends:
            one.close_listener()
        return {}

    await control.serve_commands(close_listeners, address=",".join(found))


if __name__ == "__main__":
    control.main(serve, __doc__)
