"""A frontend in this process that follows a script; its health check answers unless its event loop is said to hang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc
from kvmesh.interceptors import ErrorInterceptor
from kvmesh.server import SERVER_OPTIONS

Script = Callable[[pb.GenerateRequest, "ScriptedFrontend", Any], Awaitable[None]]

IDS = list(range(10, 20))


class ScriptedFrontend(inference_pb2_grpc.InferenceServiceServicer, health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    """Runs `script(request, self, context)` for every request; `requests` and `metadata` have all that were received."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.checks = 0
        self.cancelled = 0
        self.is_hung = False
        self.is_draining = False
        self.address = ""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # type: ignore[override]  # the sync API's
        """Run the script."""
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            await self.script(request, self, context)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
        """Answer unless the loop hangs: SERVING, or NOT_SERVING while the frontend drains."""
        self.checks += 1
        while self.is_hung:
            await asyncio.sleep(0.01)
        states = health_pb2.HealthCheckResponse
        return states(status=states.NOT_SERVING if self.is_draining else states.SERVING)


@asynccontextmanager
async def scripted(
    script: Script, credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[ScriptedFrontend]:
    """Serve a scripted frontend on a free port."""
    frontend = ScriptedFrontend(script)
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=SERVER_OPTIONS)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(frontend, server)
    health_pb2_grpc.add_HealthServicer_to_server(frontend, server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    frontend.address = f"127.0.0.1:{port}"
    try:
        yield frontend
    finally:
        await server.stop(0)


async def begin(request: pb.GenerateRequest, context: Any, count: int) -> int:
    """Write `started` and `count` tokens after those that the client has received; return the number that it has then."""
    await context.write(pb.GenerateResponse(started=pb.Started(request_id="r", seed=7, resume_token=b"t")))
    have = len(request.options.resume.received_token_ids)
    ids = IDS[have : have + count]
    if ids:
        await context.write(
            pb.GenerateResponse(tokens=pb.Tokens(ids=ids, text="x" * len(ids), position=have))
        )
    return have + len(ids)


async def well(request: pb.GenerateRequest, frontend: ScriptedFrontend, context: Any) -> None:
    """Stream all ten tokens and the end."""
    await begin(request, context, len(IDS))
    await context.write(
        pb.GenerateResponse(finished=pb.Finished(usage=pb.Usage(output_token_count=len(IDS))))
    )


def stalls(after: int, *, hangs: bool) -> Script:
    """Return a script that stalls after `after` tokens (-1: before `started`). With `hangs` the whole event loop
    stalls.
    """

    async def script(request: pb.GenerateRequest, frontend: ScriptedFrontend, context: Any) -> None:
        frontend.is_hung = hangs
        if after >= 0:
            await begin(request, context, after)
        await asyncio.Event().wait()

    return script
