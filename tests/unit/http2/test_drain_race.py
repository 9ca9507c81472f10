"""Calls that cross a server's GOAWAY on the wire."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc
from hyperframe.frame import PingFrame

from kvmesh.http2.connection import ConnectionLimits
from kvmesh.http2.server import BatchedServer, EdgeLimits
from kvmesh.http2.server_connection import CallLimits
from tests.raw_frames import data_frames, framed, headers_frames, request_block
from tests.raw_http2 import RawConnection

LIMITS: Final = EdgeLimits(
    calls=CallLimits(streams_max=10, message_bytes_max=1024, metadata_bytes_max=8_192),
    connections=ConnectionLimits(keepalive_s=60.0, handshake_s=10.0),
    connections_max=10,
)
STOP_S: Final = 30.0


async def test_a_call_right_behind_the_answer_to_the_drains_ping_is_served() -> None:
    """gRPC's C core writes that answer before the headers of calls that it began earlier."""
    released = asyncio.Event()

    async def held(request: bytes, context: Any) -> bytes:
        await released.wait()
        return request

    server = BatchedServer((), LIMITS)
    server.add_registered_method_handlers("Held", {"Get": grpc.unary_unary_rpc_method_handler(held)})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with RawConnection.connect(f"127.0.0.1:{port}") as connection:
        first = connection.call("/Held/Get")
        await first.send_message(b"1")
        await connection.ping()
        connection.answers = False
        pings = connection.frames["PingFrame"]
        stopping = asyncio.create_task(server.stop(STOP_S))
        await connection.until(lambda: connection.frames["PingFrame"] > pings)
        second = connection.open()
        connection.send(
            PingFrame(0, bytes(8), flags=["ACK"]),
            *headers_frames(second.number, request_block("/Held/Get", authority="test")),
            *data_frames(second.number, framed(b"2"), end_stream=True),
        )
        await connection.until(lambda: connection.frames["GoAwayFrame"] == 2)
        released.set()
        await first.until(lambda: first.has_ended)
        await second.until(lambda: second.has_ended)
        assert second.reset_code is None
        assert (second.messages, second.trailers["grpc-status"]) == ([b"2"], "0")
    await stopping
