"""Readiness checks of the processes of a mesh, and health checks of running ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import grpc

from kvmesh import health_reason
from kvmesh.cli.mesh_file import NoMesh, read_mesh
from kvmesh.redis_sentinel_url import is_sentinel
from kvmesh.redis_url import MASK, PASSWORD_REFUSED, without_masked
from kvmesh.server import channel

POLL_S: Final = 0.05
"""Interval between two polls of another process, which cannot notify the supervisor."""

CALL_S: Final = 5.0
TRITON_MODEL: Final = "tensorrt_llm"


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of a process as `host:port`; an empty one is not offered."""

    address: str
    metrics_address: str = ""
    http_address: str = ""


class Lines(Protocol):
    """Output of a starting process."""

    pid: int

    def ready_line(self) -> dict[str, Any] | None:
        """Return the ready line, or None while it is not printed."""
        ...


@dataclass(frozen=True, slots=True)
class ReadyLine:
    """Readiness of a service, which prints one JSON line."""

    async def wait(self, lines: Lines) -> Addresses:
        while (line := lines.ready_line()) is None:
            await asyncio.sleep(POLL_S)
        # Frontends alone have one; those of release 0.1.0 have none.
        http_address = str(line.get("http_address", ""))
        return Addresses(str(line["address"]), str(line["metrics_address"]), http_address)


@dataclass(frozen=True, slots=True)
class ModelReady:
    """Readiness of a Triton server: its model is loaded."""

    address: str
    metrics_address: str

    async def wait(self, lines: Lines) -> Addresses:
        while not await is_model_ready(self.address):
            await asyncio.sleep(POLL_S)
        return Addresses(self.address, self.metrics_address)


@dataclass(frozen=True, slots=True)
class RedisReady:
    """Readiness of a Redis: it answers PING."""

    address: str

    async def wait(self, lines: Lines) -> Addresses:
        while await redis_fault(f"redis://{self.address}"):
            await asyncio.sleep(POLL_S)
        return Addresses(self.address)


@dataclass(frozen=True, slots=True)
class MeshReady:
    """Readiness of a `kvmesh up`: it has written mesh.json in its data folder."""

    data_dir: Path

    async def wait(self, lines: Lines) -> Addresses:
        while True:
            with suppress(NoMesh):
                mesh = read_mesh(self.data_dir)
                if mesh.pid == lines.pid:
                    return Addresses(mesh.address_of("frontend"))
            await asyncio.sleep(POLL_S)


Ready = ReadyLine | ModelReady | RedisReady | MeshReady


async def is_model_ready(address: str) -> bool:
    """Ask a Triton server at `host:port` whether the engine's model is loaded."""
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    async with channel(address) as to_engine:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(to_engine)
        request = service_pb2.ModelReadyRequest(name=TRITON_MODEL)
        try:
            return bool((await stub.ModelReady(request, timeout=CALL_S)).ready)
        except grpc.aio.AioRpcError:
            return False


async def is_serving(address: str, open_channel: Callable[[str], grpc.aio.Channel] = channel) -> bool:
    """Ask a service at `host:port` for its health."""
    return (await health_of(address, open_channel))[0]


async def health_of(address: str, open_channel: Callable[[str], grpc.aio.Channel]) -> tuple[bool, str]:
    """Return whether the service at `host:port` serves, and its reason if it gives one."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with open_channel(address) as to_service:
        stub = health_pb2_grpc.HealthStub(to_service)
        check = stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_S)
        try:
            answer = await check
        except grpc.aio.AioRpcError:
            return False, ""
        reason = health_reason.reason_of(await check.trailing_metadata())
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING), reason


async def redis_fault(url: str) -> str:
    """Send PING to the operator's Redis at `url`; return why it did not answer, or an empty text.

    A `url` with a masked password proves less: a Redis that refuses for lack of a password counts as answering. With
    sentinels that do so, it is not known whether a Redis answers.
    """
    is_masked = MASK in url
    import redis.asyncio
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    from kvmesh.redis_link import TIMEOUT_S
    from kvmesh.redis_sentinel import SentinelsRefuse, sentinel_client

    try:
        async with asyncio.timeout(CALL_S):
            asked = without_masked(url) if is_masked else url
            client = (
                sentinel_client(asked, timeout_s=TIMEOUT_S, connections_max=1)
                if is_sentinel(asked)
                else redis.asyncio.Redis.from_url(asked, retry=Retry(NoBackoff(), 0))
            )
            try:
                await client.execute_command("PING")  # type: ignore[no-untyped-call]  # the library left it out
            finally:
                await client.aclose()
    except TimeoutError:
        return f"no answer within {CALL_S:g} s"
    except SentinelsRefuse:
        return "not known: the URL is masked" if is_masked else f"it {PASSWORD_REFUSED}"
    except redis.AuthenticationError:
        return "" if is_masked else f"it {PASSWORD_REFUSED}"
    except (redis.RedisError, OSError) as error:
        return str(error).rstrip(".") or type(error).__name__
    except (ValueError, TypeError, KeyError, AttributeError):  # their text may quote a part of the password
        return "the URL cannot be parsed; write special characters of a password as %XX"
    return ""
