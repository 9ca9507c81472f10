"""A server on the batched edge for calls that a mesh cannot give: `python -m tests.clients.ticker`.

It streams messages at a steady pace, says its name, closes its listener on request (GOAWAY), and speaks a part of the
KServe protocol, for Triton's client.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2 as kserve
from tritonclient.grpc import service_pb2_grpc as kserve_grpc

from kvmesh.server import BATCHED, MeshServer, ServerLimits, run

SERVICE: Final = "kvmesh.clients.v1.TickerService"
TICK: Final = f"/{SERVICE}/Tick"
NAME: Final = f"/{SERVICE}/Name"
ECHO: Final = f"/{SERVICE}/Echo"
ECHOES: Final = 8
MODEL: Final = "twice"


class Ticker:
    """The methods. `Tick` takes {"count", "every_s"} as JSON, and streams numbers. `Echo` repeats its request."""

    def __init__(self, name: str) -> None:
        self._name = name.encode()

    def register(self, server: Any) -> None:
        """Add the methods to `server`."""
        server.add_registered_method_handlers(
            SERVICE,
            {
                "Tick": grpc.unary_stream_rpc_method_handler(self._tick),
                "Name": grpc.unary_unary_rpc_method_handler(self._say),
                "Echo": grpc.unary_stream_rpc_method_handler(self._echo),
            },
        )

    async def _say(self, request: bytes, context: Any) -> bytes:
        return self._name

    async def _echo(self, request: bytes, context: Any) -> None:
        for _ in range(ECHOES):
            await context.write(request)

    async def _tick(self, request: bytes, context: Any) -> None:
        wanted, loop = json.loads(request), asyncio.get_running_loop()
        next_s = loop.time()
        for number in range(wanted["count"]):
            await context.write(b"%d" % number)
            next_s += wanted["every_s"]
            await asyncio.sleep(next_s - loop.time())


class KServe(kserve_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # without stubs
    """A model that doubles its input."""

    async def ServerLive(self, request: Any, context: Any) -> Any:
        return kserve.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return kserve.ServerReadyResponse(ready=True)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        return kserve.ModelReadyResponse(ready=request.name == MODEL)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        if request.name != MODEL:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"model {request.name!r}: known is {MODEL!r}")
        return kserve.ModelMetadataResponse(name=MODEL, versions=["1"])

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        return _doubled(request)

    async def ModelStreamInfer(self, requests: Any, context: Any) -> None:
        async for request in requests:
            for _ in range(3):
                await context.write(kserve.ModelStreamInferResponse(infer_response=_doubled(request)))


def _doubled(request: Any) -> Any:
    answer = kserve.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
    for given, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        numbers = memoryview(raw).cast("i")
        answer.outputs.add(name="OUTPUT", datatype=given.datatype, shape=given.shape)
        answer.raw_output_contents.append(b"".join((2 * each).to_bytes(4, "little") for each in numbers))
    return answer


async def _main(name: str, address: str) -> int:
    limits = ServerLimits(connections_max=100_000)
    server = MeshServer("ticker", name, [SERVICE], limits=limits, transport=BATCHED, keepalive_s=20.0)
    server.register(Ticker(name).register)
    server.register(lambda made: kserve_grpc.add_GRPCInferenceServiceServicer_to_server(KServe(), made))
    await server.listen(address)
    await server.set_serving(True)
    server.announce("")
    commands = asyncio.create_task(_obey(server))
    await server.run(lambda: asyncio.sleep(0))
    commands.cancel()
    return 0


async def _obey(server: MeshServer) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while await reader.readline():
        await server.close_listener("the test closes it")
        sys.stdout.write("{}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run(_main(sys.argv[1], sys.argv[2])))
