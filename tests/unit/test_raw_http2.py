"""The tests' raw HTTP/2 client against a stock gRPC server: it counts bytes, opens windows and breaks rules."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hyperframe.frame import SettingsFrame

from tests.certificates import Folder
from tests.patience import wait_for
from tests.raw_frames import (
    continuation_flood,
    headers_frames,
    hpack_bomb,
    open_headers,
    ping_flood,
    rapid_resets,
    request_block,
    settings_flood,
)
from tests.raw_http2 import RawConnection

ECHO = "/test.Echo/Repeat"
REFUSE = "/test.Echo/Refuse"
WORD = b"x" * 95
"""100 bytes on the wire with its prefix."""


Context = grpc.aio.ServicerContext[bytes, bytes]


class Echo:
    """Answers a request with itself, as often as its metadata says; `over` is set at the end of a call."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.metadata: dict[str, str | bytes] = {}

    async def repeat(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        self.metadata = dict(context.invocation_metadata() or ())
        context.add_done_callback(lambda _: self.over.set())  # type: ignore[arg-type]  # the stubs name a protocol
        for _ in range(int(self.metadata["times"])):
            yield request

    async def refuse(self, request: bytes, context: Context) -> bytes:
        status = status_pb2.Status(code=8, message="50 % of “all”")
        status.details.add().Pack(error_details_pb2.RetryInfo())
        details = (("grpc-status-details-bin", status.SerializeToString()),)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, status.message, details)


@pytest.fixture
async def server() -> AsyncIterator[tuple[grpc.aio.Server, Echo]]:
    """A server with `Echo`, started by the test once it has a port."""
    echo, made = Echo(), grpc.aio.server()
    handlers = {
        "Repeat": grpc.unary_stream_rpc_method_handler(echo.repeat),
        "Refuse": grpc.unary_unary_rpc_method_handler(echo.refuse),
    }
    made.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
    yield made, echo
    await made.stop(None)


@pytest.fixture
async def address(server: tuple[grpc.aio.Server, Echo]) -> str:
    """Address of the server, without TLS."""
    port = server[0].add_insecure_port("127.0.0.1:0")
    await server[0].start()
    return f"127.0.0.1:{port}"


async def test_a_window_is_opened_byte_by_byte(address: str) -> None:
    """The peer sends exactly the granted bytes, also across message borders."""
    async with RawConnection.connect(address, stream_window=0) as connection:
        stream = connection.call(ECHO, [("times", "3")])
        await stream.send_message(WORD)
        granted = 0
        for step in (1, 98, 1, 99, 1):
            stream.grant(step)
            granted += step
            await stream.until(lambda: stream.window == 0)
            await connection.ping()
            assert (stream.byte_count, len(stream.messages)) == (granted, granted // 100)
            assert not stream.has_ended
        stream.grant(100)
        await stream.ended()
        assert stream.messages == [WORD] * 3
        assert (stream.status, stream.headers["content-type"]) == (0, "application/grpc")


async def test_a_reset_reaches_the_handler(address: str, server: tuple[grpc.aio.Server, Echo]) -> None:
    """A client may reset in the middle of a message; the connection continues."""
    async with RawConnection.connect(address, stream_window=150) as connection:
        stream = connection.call(ECHO, [("times", "100000")])
        await stream.send_message(WORD)
        await stream.until(lambda: stream.byte_count == 150)
        stream.reset()
        await wait_for(server[1].over.wait(), 20)
        assert (stream.byte_count, len(stream.messages)) == (150, 1)
        other = connection.call(ECHO, [("times", "1"), ("some-bin", b"\x00\xff")])
        await other.send_message(WORD)
        await other.ended()
        assert other.messages == [WORD]
        assert server[1].metadata["some-bin"] == b"\x00\xff"


async def test_a_refusal_is_read_whole(address: str) -> None:
    """Status, message and details of a call without an answer are read."""
    async with RawConnection.connect(address) as connection:
        stream = connection.call(REFUSE)
        await stream.send_message(b"")
        await stream.ended()
        assert (stream.status, stream.message) == (8, "50 % of “all”")
        assert (
            status_pb2.Status.FromString(stream.details).details[0].Is(error_details_pb2.RetryInfo.DESCRIPTOR)
        )


async def test_a_body_without_end_passes_the_windows_of_the_peer(address: str) -> None:
    """A body without end passes any initial window and ends with its deadline, unanswered."""
    async with RawConnection.connect(address) as connection:
        stream = connection.call(ECHO, [("times", "1")], deadline_s=0.5)
        with pytest.raises((ConnectionError, TimeoutError)):
            while True:
                await stream.send_data(b"\0\0\x2f\xff\xff" + b"z" * 300_000)
        await stream.ended()
        assert stream.status == grpc.StatusCode.DEADLINE_EXCEEDED.value[0] or stream.reset_code is not None


async def test_a_connection_that_is_not_read_stalls(address: str) -> None:
    """Nothing arrives while reading is paused, and everything afterwards."""
    async with RawConnection.connect(address, stream_window=1 << 20) as connection:
        await connection.ping()
        connection.pause()
        stream = connection.call(ECHO, [("times", "5")])
        await stream.send_message(WORD)
        with pytest.raises(TimeoutError):
            await stream.ended(timeout_s=0.2)
        assert len(stream.messages) == 0 or stream.byte_count < 500
        connection.resume()
        await stream.ended()
        assert stream.messages == [WORD] * 5


async def test_floods_are_bytes_that_a_server_understands(address: str) -> None:
    """A server accepts floods of opened streams, resets, pings and SETTINGS, and answers each."""
    block = request_block(ECHO, [("times", "1")])
    async with RawConnection.connect(address) as connection:
        assert await connection.flood(rapid_resets(block, 20)) == 20
        assert await connection.flood(open_headers(block, 20, first_stream=41)) == 20
        assert await connection.flood(settings_flood(5)) == 5
        await connection.ping()
        assert connection.frames["SettingsFrame"] >= 1 + 6
    async with RawConnection.connect(address) as connection:
        assert await connection.flood(ping_flood(2)) == 2
        await connection.until(lambda: connection.frames["PingFrame"] >= 2 or connection.goaway is not None)


async def test_header_blocks_without_end_and_bombs_are_refused(address: str) -> None:
    """gRPC's limit on metadata applies to CONTINUATION and to the unpacked size of small blocks."""
    block = request_block(ECHO, [("times", "1")])
    async with RawConnection.connect(address) as connection:
        await connection.flood(continuation_flood(block, 2_000, b"\x00" * 10))
        await connection.until(lambda: connection.is_closed or connection.frames["RstStreamFrame"] > 0)
    async with RawConnection.connect(address) as connection:
        stream = connection.open()
        connection.send(*headers_frames(stream.number, block + hpack_bomb(15_000), end_stream=True))
        await connection.until(lambda: stream.has_ended or connection.is_closed)
        assert stream.messages == []


async def test_junk_ends_the_connection(address: str) -> None:
    """After junk the peer sends GOAWAY and closes."""
    async with RawConnection.connect(
        address, settings={SettingsFrame.MAX_CONCURRENT_STREAMS: 7}
    ) as connection:
        await connection.ping()
        connection.send(b"\xff" * 100)
        await connection.closed()
        with pytest.raises(ConnectionError):
            await connection.ping()


async def test_the_client_speaks_tls(server: tuple[grpc.aio.Server, Echo], tmp_path: Path) -> None:
    """The client speaks TLS with ALPN and verifies the server's certificate."""
    files = Folder(tmp_path, roles=["frontend"]).files("frontend")
    key, chain = Path(files.key).read_bytes(), Path(files.certificate).read_bytes()
    port = server[0].add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, chain)]))
    await server[0].start()
    tls = ssl.create_default_context(cafile=files.authority)
    tls.set_alpn_protocols(["h2"])
    async with RawConnection.connect(
        f"127.0.0.1:{port}", tls=tls, server_hostname="frontend.kvmesh.internal"
    ) as connection:
        stream = connection.call(ECHO, [("times", "2")])
        await stream.send_message(WORD)
        await stream.ended()
        assert stream.messages == [WORD] * 2
