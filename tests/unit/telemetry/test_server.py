"""The server shell: no text of an exception leaves, bad messages are refused by name, and shutdown is graceful."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from bench.generate_only import GenerateOnly
from kvmesh import health_reason
from kvmesh.errors import MeshError, from_rpc_error, internal
from kvmesh.inference.v1 import inference_pb2, inference_pb2_grpc
from kvmesh.server import DRAINS, PAUSES, STARTS, ListenError, MeshServer, channel
from kvmesh.telemetry import start_logging
from tests.both_transports import transport
from tests.patience import patience, wait_for
from tests.raw_frames import request_block
from tests.raw_http2 import RawConnection

__all__ = ["transport"]

SERVICE = "kvmesh.inference.v1.InferenceService"


def refusal() -> MeshError:
    return MeshError("QUEUE_FULL", "queue full: 8/8", retry_after_s=0.5)


class Servicer(GenerateOnly):
    """Behaves as `session_id` names it."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.entered.set()
        match request.session_id:
            case "bug":
                raise ValueError("secret internals")
            case "refused":
                raise refusal()
            case "group":
                raise ExceptionGroup("many", [ValueError("secret"), refusal()])
            case "abort":
                await context.abort(grpc.StatusCode.NOT_FOUND, "said on purpose")
            case "hang":
                try:
                    await asyncio.Event().wait()
                finally:
                    self.cancelled.set()
        yield inference_pb2.GenerateResponse()


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[MeshServer, Servicer, grpc.aio.Channel]]:
    server = MeshServer("frontend", "frontend-0", [SERVICE])
    servicer = Servicer()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server.grpc)
    address = await server.listen("127.0.0.1:0")
    await server.set_serving(True)
    async with channel(address) as to_server:
        try:
            yield server, servicer, to_server
        finally:
            await server.grpc.stop(0)


async def failure(to_server: grpc.aio.Channel, session: str) -> grpc.aio.AioRpcError:
    stub = inference_pb2_grpc.InferenceServiceStub(to_server)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Generate(inference_pb2.GenerateRequest(session_id=session)):
            pass
    return caught.value


async def test_text_of_an_unknown_exception_never_leaves(caplog: pytest.LogCaptureFixture) -> None:
    """A bug is INTERNAL with a fixed sentence for the client and a traceback in the log."""
    async with serving() as (_, _, to_server):
        error = await failure(to_server, "bug")
    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, internal().message)
    assert "secret" not in str(error.trailing_metadata())
    assert "secret internals" in caplog.text


@pytest.mark.parametrize("session", ["refused", "group"])
async def test_known_errors_get_their_status_also_from_a_group(session: str) -> None:
    """A MeshError keeps code, text and details. In a group the first one counts."""
    async with serving() as (_, _, to_server):
        error = await failure(to_server, session)
    details = from_rpc_error(error)
    assert details.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (details.message, details.reason, details.retry_after_s) == ("queue full: 8/8", "QUEUE_FULL", 0.5)


async def test_abort_passes_unchanged() -> None:
    """A handler that aborts on purpose is not translated again."""
    async with serving() as (_, _, to_server):
        error = await failure(to_server, "abort")
    assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "said on purpose")


async def test_cancel_of_the_client_reaches_the_handler() -> None:
    """The interceptor passes CancelledError to the handler."""
    async with serving() as (_, servicer, to_server):
        stub = inference_pb2_grpc.InferenceServiceStub(to_server)
        call = stub.Generate(inference_pb2.GenerateRequest(session_id="hang"))
        reading = asyncio.ensure_future(call.read())
        await wait_for(servicer.entered.wait(), 5)
        call.cancel()
        await wait_for(servicer.cancelled.wait(), 5)
        await asyncio.gather(reading, return_exceptions=True)


async def test_sigterm_drains_before_it_stops() -> None:
    """Health turns NOT_SERVING before the drain, and the server stops after it."""
    async with serving() as (server, _, to_server):
        health = health_pb2_grpc.HealthStub(to_server)
        seen: list[Any] = []

        async def state(service: str) -> Any:
            return (await health.Check(health_pb2.HealthCheckRequest(service=service))).status

        async def drain() -> None:
            seen.extend([await state(""), await state(SERVICE)])

        assert await state("") == await state(SERVICE) == health_pb2.HealthCheckResponse.SERVING
        running = asyncio.ensure_future(server.run(drain))
        await asyncio.sleep(0)  # one turn of the loop: the signal handlers are set before the first wait
        os.kill(os.getpid(), signal.SIGTERM)
        await wait_for(running, 5)
        assert seen == [health_pb2.HealthCheckResponse.NOT_SERVING] * 2
        with pytest.raises(grpc.aio.AioRpcError):
            await health.Check(health_pb2.HealthCheckRequest(), timeout=0.5)


async def test_health_and_its_reason_agree() -> None:
    """The reason is there from the start, is empty exactly while health is SERVING, and is that of health checks.

    A drain goes before a standby, a standby before a cordon, and all of them before the reason of the process itself.
    """
    server = MeshServer("frontend", "frontend-0", [SERVICE])
    assert server.unready_reason == STARTS
    address = await server.listen("127.0.0.1:0")
    async with channel(address) as to_server:
        health = health_pb2_grpc.HealthStub(to_server)

        async def told() -> str:
            call = health.Check(health_pb2.HealthCheckRequest(), timeout=20)
            is_serving = (await call).status == health_pb2.HealthCheckResponse.SERVING
            assert is_serving == (server.unready_reason == "")
            reason = health_reason.reason_of(await call.trailing_metadata())
            assert reason == server.unready_reason
            return reason

        assert await told() == STARTS
        for change, reason in (
            (server.set_serving(False, "waits for a router"), "waits for a router"),
            (server.set_serving(False), "waits for a router"),
            (server.set_serving(True), ""),
            (server.set_aside("cordoned"), "cordoned"),
            (server.stand_by("another process holds the name"), "another process holds the name"),
            (server.set_serving(False), "another process holds the name"),
            (server.stand_by(""), "cordoned"),
            (server.set_aside(""), PAUSES),
            (server.set_serving(False, "its engine does not answer"), "its engine does not answer"),
            (server.set_serving(True, "ignored"), ""),
        ):
            await change
            assert await told() == reason
        await server.stand_by("another process holds the name")
        server.stop()
        assert server.unready_reason == DRAINS
        await server.set_serving(True)
        assert await told() == DRAINS
        await server.grpc.stop(0)


@pytest.mark.parametrize("end", ["second signal", "time"])
async def test_a_hanging_drain_is_ended(end: str) -> None:
    """A drain without an end is cancelled by a second signal or by its time limit."""
    async with serving() as (server, _, _):
        entered, cancelled = asyncio.Event(), asyncio.Event()

        async def drain() -> None:
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        running = asyncio.ensure_future(server.run(drain, drain_s=0.1 if end == "time" else 60))
        server.stop()
        await wait_for(entered.wait(), 5)
        if end == "second signal":
            server.stop()
        await wait_for(running, 5)
        assert cancelled.is_set()


async def test_an_undecodable_name_ends_only_its_call(restore_logging: None) -> None:
    """Bytes that are not UTF-8 in a method, an authority or a header end no other call, and write no log line."""
    logged = io.StringIO()
    start_logging("info", "frontend", "frontend-0", logged)
    async with serving() as (server, _, to_server), RawConnection.connect(server.address) as raw:
        path = f"/{SERVICE}/Generate"
        for spoilt in (b":path", b":authority", b"user-agent"):
            block = request_block(path, authority="mesh").replace(*_spoiling(spoilt, path))
            stream = raw.call(path, block=block)
            await stream.send_message(b"")
            await stream.ended()
        unknown = raw.call("/no.Such/Method")
        await unknown.ended()
        assert unknown.status == grpc.StatusCode.UNIMPLEMENTED.value[0]
        health = health_pb2_grpc.HealthStub(to_server)
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert logged.getvalue() == ""


def _spoiling(name: bytes, path: str) -> tuple[bytes, bytes]:
    value = {b":path": path.encode(), b":authority": b"mesh", b"user-agent": b"raw-http2"}[name]
    return value, b"\xff" + value[1:]


async def test_a_process_does_not_outlive_its_grpc_server() -> None:
    """A supervisor restarts a process that ended. It would not restart a live process that no longer listens."""
    async with serving() as (server, _, _):

        async def drain() -> None:
            raise AssertionError("nothing is there to drain")

        running = asyncio.ensure_future(server.run(drain))
        await asyncio.sleep(0)
        await server.grpc.stop(0)
        with pytest.raises(RuntimeError, match="ended by itself"):
            await wait_for(running, 10)


async def test_a_port_in_use_is_one_sentence() -> None:
    """Two processes cannot share a port."""
    async with serving() as (server, _, _):
        second = MeshServer("router", "router-0", [])
        with pytest.raises(ListenError, match=f"Cannot listen on {server.address}: .*in use"):
            await second.listen(server.address)
        await second.grpc.stop(0)


async def test_ready_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    """A supervisor reads the chosen port from one line on stdout."""
    async with serving() as (server, _, _):
        server.announce("127.0.0.1:9")
        lines = capsys.readouterr().out.splitlines()
        assert [json.loads(line) for line in lines] == [
            {
                "ready": True,
                "role": "frontend",
                "id": "frontend-0",
                "address": server.address,
                "metrics_address": "127.0.0.1:9",
            }
        ]


async def test_reflection_lists_the_services() -> None:
    """grpcurl and similar tools find the services."""
    async with serving() as (_, _, to_server):
        stub = reflection_pb2_grpc.ServerReflectionStub(to_server)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        async for answer in call:
            names = {service.name for service in answer.list_services_response.service}
            break
        call.cancel()
    assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_channel_finds_a_restarted_server_within_two_seconds(free_port: int) -> None:
    """The backoff of reconnects is short, so a restarted peer is used again at once."""
    async with channel(f"127.0.0.1:{free_port}") as to_server:
        for _ in range(2):
            server = MeshServer("router", "router-0", [])
            await server.listen(f"127.0.0.1:{free_port}")
            health = health_pb2_grpc.HealthStub(to_server)
            async with patience(2):
                await health.Check(health_pb2.HealthCheckRequest(), timeout=60, wait_for_ready=True)
            await server.grpc.stop(0)
            with pytest.raises(grpc.aio.AioRpcError):
                await health.Check(health_pb2.HealthCheckRequest(), timeout=20)


def listens(server: MeshServer) -> bool:
    return server.is_open


async def refused(address: str) -> None:
    """Wait until connections to `address` are refused."""
    host, _, port = address.rpartition(":")
    async with patience(5):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                return
            writer.close()


async def test_a_closed_listener_cuts_no_stream_and_opens_again_at_its_address() -> None:
    """New calls fail while it is closed, a running stream goes on, and the process stays; then calls succeed again."""
    server, servicer = MeshServer("frontend", "frontend-0", [SERVICE]), Servicer()
    server.register(lambda grpc: inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, grpc))
    address = await server.listen("127.0.0.1:0")
    await server.set_serving(True)

    async def drain() -> None:
        """Have nothing to drain."""

    async def check() -> Any:
        async with channel(address) as fresh:
            health = health_pb2_grpc.HealthStub(fresh)
            return (await health.Check(health_pb2.HealthCheckRequest(), timeout=20)).status

    running = asyncio.ensure_future(server.run(drain))
    async with channel(address) as to_server:
        stub = inference_pb2_grpc.InferenceServiceStub(to_server)
        call = stub.Generate(inference_pb2.GenerateRequest(session_id="hang"))
        reading = asyncio.ensure_future(call.read())
        await wait_for(servicer.entered.wait(), 5)
        for _ in range(2):
            await server.close_listener("drained")
            await server.close_listener("drained")
            assert not listens(server)
            await refused(address)
            assert not running.done() and not reading.done() and not servicer.cancelled.is_set()
            await server.open_listener()
            await server.open_listener()
            assert listens(server) and server.address == address
            assert await check() == health_pb2.HealthCheckResponse.SERVING
        error = await failure(to_server, "refused")
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not reading.done()
        server.stop()
        await wait_for(running, 10)
        await wait_for(servicer.cancelled.wait(), 5)
        await asyncio.gather(reading, return_exceptions=True)


async def test_a_process_does_not_outlive_its_second_server_either() -> None:
    """After a reopening the new server is watched, also while the old one has a stream."""
    server = MeshServer("frontend", "frontend-0", [SERVICE])
    await server.listen("127.0.0.1:0")

    async def drain() -> None:
        raise AssertionError("nothing is there to drain")

    running = asyncio.ensure_future(server.run(drain))
    await asyncio.sleep(0)  # one turn of the loop: the first server is watched
    await server.close_listener("drained")
    await refused(server.address)
    await server.open_listener()
    await asyncio.sleep(0)  # one turn of the loop: the second server is watched
    await server.grpc.stop(0)
    with pytest.raises(RuntimeError, match="ended by itself"):
        await wait_for(running, 10)
