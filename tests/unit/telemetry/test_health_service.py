"""The health service of every process: Check, Watch and List of grpc.health.v1."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.health import HEALTH_SERVICE
from kvmesh.server import MeshServer, channel
from tests.both_transports import transport

__all__ = ["transport"]

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LONG_NAME = "kvmesh.a.very.long.name." * 20
"""Longer than a length of one byte can state."""


@pytest.fixture
async def served() -> AsyncIterator[tuple[MeshServer, grpc.aio.Channel]]:
    server = MeshServer("frontend", "frontend-0", ["kvmesh.inference.v1.InferenceService", LONG_NAME])
    address = await server.listen("127.0.0.1:0")
    async with channel(address) as to_server:
        yield server, to_server
        await server.grpc.stop(0)


def list_response() -> Any:
    """HealthListResponse as health.proto of gRPC 1.72 defines it."""
    file = descriptor_pb2.FileDescriptorProto(name="list.proto", package="test", syntax="proto3")
    answer = file.message_type.add(name="Answer")
    answer.field.add(name="status", number=1, type="TYPE_INT32", label="LABEL_OPTIONAL")
    response = file.message_type.add(name="List")
    response.field.add(
        name="statuses",
        number=1,
        type="TYPE_MESSAGE",
        label="LABEL_REPEATED",
        type_name=".test.List.StatusesEntry",
    )
    entry = response.nested_type.add(name="StatusesEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type="TYPE_STRING", label="LABEL_OPTIONAL")
    entry.field.add(
        name="value", number=2, type="TYPE_MESSAGE", label="LABEL_OPTIONAL", type_name=".test.Answer"
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("test.List"))


async def test_list_has_the_status_of_every_service(served: tuple[MeshServer, grpc.aio.Channel]) -> None:
    """It has the process and each name, as the official message decodes it."""
    server, to_server = served
    call: Any = to_server.unary_unary(f"/{HEALTH_SERVICE}/List", None, list_response().FromString)
    for is_serving, state in ((True, SERVING), (False, NOT_SERVING)):
        await server.set_serving(is_serving)
        told = await call(b"", timeout=10)
        assert {name: answer.status for name, answer in told.statuses.items()} == {
            "": state,
            "kvmesh.inference.v1.InferenceService": state,
            LONG_NAME: state,
        }


async def test_a_watcher_gets_changes_after_another_one_left(
    served: tuple[MeshServer, grpc.aio.Channel],
) -> None:
    """Load balancers come and go. Each one is notified of the drain."""
    server, to_server = served
    await server.set_serving(True)
    stub: Any = health_pb2_grpc.HealthStub(to_server)
    stays, leaves = (stub.Watch(health_pb2.HealthCheckRequest(), timeout=10) for _ in range(2))
    assert (await stays.read()).status == SERVING
    assert (await leaves.read()).status == SERVING
    leaves.cancel()
    unknown = stub.Watch(health_pb2.HealthCheckRequest(service="none"), timeout=10)
    assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    await server.set_serving(False)
    assert (await stays.read()).status == NOT_SERVING


async def test_check_of_an_unknown_name(served: tuple[MeshServer, grpc.aio.Channel]) -> None:
    """NOT_FOUND, as the protocol requires."""
    _, to_server = served
    stub: Any = health_pb2_grpc.HealthStub(to_server)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Check(health_pb2.HealthCheckRequest(service="none"), timeout=10)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
