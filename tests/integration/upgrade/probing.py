"""Readiness probes as a kubelet runs them: a health check of gRPC, or a page over HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.health_reason import reason_of
from tests.integration.upgrade.rollout_settings import GRPC, Probe
from tests.patience import wait_for


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one probe."""

    is_ready: bool
    text: str
    """Answer of the process. Empty: none arrived in time."""


_NONE: Final = Answer(False, "")


async def asked(probe: Probe, host: str) -> Answer:
    """Run `probe` once, over a new connection. Its timeout is in seconds of a quiet machine."""
    try:
        run = _health_check if probe.kind == GRPC else _page
        return await wait_for(run(probe, host), probe.timeout_s)
    except (OSError, TimeoutError, EOFError):
        return _NONE


async def _health_check(probe: Probe, host: str) -> Answer:
    async with grpc.aio.insecure_channel(f"{host}:{probe.port}") as channel:
        call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=probe.path))
        try:
            answer = await call
            reason = reason_of(await call.trailing_metadata())
        except grpc.aio.AioRpcError as error:
            return _NONE if error.code() is grpc.StatusCode.UNAVAILABLE else Answer(False, error.code().name)
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return Answer(status == "SERVING", f"{status} {reason}".strip())


async def _page(probe: Probe, host: str) -> Answer:
    reader, writer = await asyncio.open_connection(host, probe.port)
    try:
        writer.write(f"GET {probe.path} HTTP/1.0\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n")).decode(errors="replace").strip()
    finally:
        writer.close()
    words = head.split()
    is_status = len(words) > 1 and words[1].isdecimal()
    is_ready = is_status and HTTPStatus.OK <= int(words[1]) < HTTPStatus.BAD_REQUEST
    return Answer(is_ready, head)
