"""Messages above the server's bounds on unread output, to clients whose flow-control windows allow them at once."""

from __future__ import annotations

from typing import Any, Final

import grpc

from kvmesh.http2.connection import UNREAD_BYTES_MAX, ConnectionLimits
from kvmesh.http2.server import BatchedServer, EdgeLimits
from kvmesh.http2.server_connection import CallLimits
from tests.raw_http2 import RawConnection

MESSAGE_BYTES: Final = 16 * UNREAD_BYTES_MAX
"""More than the socket buffers of both ends take."""

LIMITS: Final = EdgeLimits(
    calls=CallLimits(streams_max=10, message_bytes_max=1024, metadata_bytes_max=8_192),
    connections=ConnectionLimits(keepalive_s=60.0, handshake_s=10.0),
    connections_max=10,
)


async def large(request: bytes, context: Any) -> bytes:
    """Return one large message."""
    return bytes(MESSAGE_BYTES)


async def test_a_large_message_arrives_whatever_the_windows_of_its_reader_are() -> None:
    """A reader is not taken for one that reads nothing because one message fills the socket."""
    server = BatchedServer((), LIMITS)
    server.add_registered_method_handlers("Large", {"Get": grpc.unary_unary_rpc_method_handler(large)})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        window = 2 * MESSAGE_BYTES
        async with RawConnection.connect(
            f"127.0.0.1:{port}", stream_window=window, connection_window=window
        ) as connection:
            await connection.ping()
            call = connection.call("/Large/Get")
            await call.send_message(b"")
            await call.until(lambda: call.has_ended)
            assert [len(message) for message in call.messages] == [MESSAGE_BYTES]
            assert call.trailers["grpc-status"] == "0"
    finally:
        await server.stop(None)
