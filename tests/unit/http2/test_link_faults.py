"""Faults below a link: GOAWAY, resets, loss, closed channels at each moment, and TLS that ends early."""

from __future__ import annotations

import asyncio
import gc
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
import uvloop
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from kvmesh.http2.client import LinkCall, LinkChannel, LinkTls
from kvmesh.http2.connection import ConnectionLimits
from kvmesh.http2.tls import client_context
from kvmesh.trust.server_credentials import ServerMaterial, ServerTls
from tests.certificates import Folder
from tests.patience import wait_for
from tests.raw_frames import framed, literal_block
from tests.unit.http2.echo import SERVICE, echoing
from tests.unit.http2.siege import until

LIMITS = ConnectionLimits(keepalive_s=60.0, handshake_s=10.0)
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it
SETTLED = (SettingsFrame(0), SettingsFrame(0, flags=["ACK"]))
ANSWER = literal_block([(b":status", b"200"), (b"content-type", b"application/grpc")])
OK = literal_block([(b"grpc-status", b"0")])


def plain(data: bytes) -> bytes:
    return data


def headers(block: bytes, *flags: str) -> Frame:
    return HeadersFrame(1, block, flags=["END_HEADERS", *flags])


@asynccontextmanager
async def answering(*frames: Frame, closes: bool = False) -> AsyncIterator[str]:
    """Serve one connection: settings, then `frames` once the peer has opened a stream."""

    serving: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())  # type: ignore[arg-type]  # never None here
        writer.write(b"".join(each.serialize() for each in SETTLED))
        with suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\1\4\0\0\0\1")  # HEADERS of stream 1
            writer.write(b"".join(each.serialize() for each in frames))
            while not closes and await reader.read(1 << 16):
                pass
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"
    finally:
        server.close()
        if serving:
            await asyncio.wait(serving)


@asynccontextmanager
async def linked(address: str) -> AsyncIterator[tuple[LinkChannel, Callable[[], LinkCall]]]:
    """Yield a channel and what starts a call. At the end no task is left, and the loop saw no error."""
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    tasks = asyncio.all_tasks()
    channel = LinkChannel(address, None, message_bytes_max=1_000, limits=LIMITS)
    try:
        yield channel, channel.stream_stream(f"/{SERVICE}/Both", plain, plain)
    finally:
        await wait_for(channel.close(), 5)
    await until(
        lambda: (
            not [
                one for one in asyncio.all_tasks() - tasks if one.get_name().startswith(("call:", "connect:"))
            ]
        )
    )
    assert not errors, errors


ENDS = {
    "a reset": ([RstStreamFrame(1, 8)], grpc.StatusCode.CANCELLED),
    "a refusal": ([RstStreamFrame(1, 7)], grpc.StatusCode.UNAVAILABLE),
    "another reset": ([RstStreamFrame(1, 2)], grpc.StatusCode.INTERNAL),
    "GOAWAY below the stream": ([GoAwayFrame(0, last_stream_id=0)], grpc.StatusCode.UNAVAILABLE),
    "an end without a status": (
        [headers(ANSWER), headers(literal_block([(b"a", b"b")]), "END_STREAM")],
        grpc.StatusCode.UNKNOWN,
    ),
    "an end without trailers": (
        [headers(ANSWER), DataFrame(1, b"", flags=["END_STREAM"])],
        grpc.StatusCode.INTERNAL,
    ),
    "HTTP 503": ([headers(literal_block([(b":status", b"503")]), "END_STREAM")], grpc.StatusCode.UNAVAILABLE),
    "another content": (
        [headers(literal_block([(b":status", b"200"), (b"content-type", b"text/html")]))],
        grpc.StatusCode.UNKNOWN,
    ),
    "a message above the limit": (
        [headers(ANSWER), DataFrame(1, framed(b"", length=2_000))],
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ),
    "a cut message": (
        [headers(ANSWER), DataFrame(1, framed(b"x", length=9), flags=["END_STREAM"])],
        grpc.StatusCode.INTERNAL,
    ),
    "a push": ([PushPromiseFrame(1, 2, ANSWER, flags=["END_HEADERS"])], grpc.StatusCode.UNAVAILABLE),
    "a window above 2^31-1": ([WindowUpdateFrame(1, 2**31 - 1)], grpc.StatusCode.INTERNAL),
    "a broken connection": ([WindowUpdateFrame(0, 2**31 - 1)], grpc.StatusCode.UNAVAILABLE),
}


@pytest.mark.parametrize(("frames", "code"), ENDS.values(), ids=ENDS)
async def test_each_end_has_its_status(frames: list[Frame], code: grpc.StatusCode) -> None:
    async with answering(*frames) as address, linked(address) as (_, start):
        call = start()
        with suppress(grpc.aio.UsageError):
            await wait_for(call.write(b"x"), 5)
        assert await wait_for(call.read(), 5) is EOF
        assert await wait_for(call.code(), 5) is code
        with pytest.raises(grpc.aio.UsageError):
            await wait_for(call.write(b"y"), 5)
        assert call.cancel() is False


@pytest.mark.parametrize(
    "address", ["a..b:1", f"{'x' * 64}.test:1", "127.0.0.1:1", "127.0.0.1:99999", "127.0.0.1:x"]
)
async def test_an_address_that_cannot_be_connected_ends_its_calls(address: str) -> None:
    """It may come from Redis, so any of them is the other side's fault."""
    async with linked(address) as (_, start):
        call = start()
        assert await wait_for(call.read(), 5) is EOF
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_loss_in_the_middle_ends_each_call_and_the_next() -> None:
    async with answering(headers(ANSWER), closes=True) as address, linked(address) as (_, start):
        calls = [start() for _ in range(3)]
        assert [await wait_for(call.read(), 5) for call in calls] == [EOF] * 3
        later = start()
        assert await wait_for(later.code(), 5) is grpc.StatusCode.UNAVAILABLE
        assert {await call.code() for call in calls} == {grpc.StatusCode.UNAVAILABLE}


async def test_a_goaway_lets_the_older_call_end() -> None:
    frames = (
        GoAwayFrame(0, last_stream_id=1),
        headers(ANSWER),
        DataFrame(1, framed(b"last")),
        headers(OK, "END_STREAM"),
    )
    async with answering(*frames) as address, linked(address) as (_, start):
        older = start()
        await wait_for(older.write(b"x"), 5)
        assert await wait_for(older.read(), 5) == b"last"
        assert await wait_for(older.read(), 5) is EOF
        assert await older.code() is grpc.StatusCode.OK
        assert await wait_for(start().code(), 5) is grpc.StatusCode.UNAVAILABLE


async def test_a_half_closed_call_sends_nothing_more_and_keeps_its_connection() -> None:
    """DATA behind its end would end the connection, with all of its calls."""
    async with echoing() as (_, _, address), linked(address) as (_, start):
        call, other = start(), start()
        await wait_for(call.write(b"x"), 5)
        for _ in range(2):
            await wait_for(call.done_writing(), 5)
        with pytest.raises(grpc.aio.UsageError):
            await wait_for(call.write(b"y"), 5)
        assert [await wait_for(call.read(), 5) for _ in range(2)] == [b"x", EOF]
        assert await call.code() is grpc.StatusCode.OK
        await wait_for(other.write(b"z"), 5)
        assert await wait_for(other.read(), 5) == b"z"


async def test_calls_that_ended_are_forgotten() -> None:
    async with echoing() as (_, _, address), linked(address) as (channel, start):
        for number in range(20):
            call = start()
            await wait_for(call.write(b"x"), 5)
            assert await wait_for(call.read(), 5) == b"x"
            if number % 2:
                call.cancel()
            else:
                assert call._stream is not None
                call._stream.reset()
        assert channel._connecting is not None
        connection = channel._connecting.result()
        assert not connection._calls
        assert not connection.streams


@pytest.mark.parametrize("turns", range(8))
async def test_a_channel_that_closes_while_it_connects_leaves_nothing(turns: int) -> None:
    opened: list[asyncio.StreamWriter] = []
    closed = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer)
        with suppress(OSError):
            while await reader.read(1 << 16):
                pass
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        closed.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with linked(f"{host}:{port}") as (channel, start):
        call = start()
        for _ in range(turns):
            await asyncio.sleep(0)
        if turns > 5:
            await until(lambda: bool(opened))
        await wait_for(channel.close(), 5)
        assert await wait_for(call.code(), 5) is not grpc.StatusCode.OK
        if opened:
            await wait_for(closed.wait(), 5)
    server.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_channel_that_closes_in_any_turn_of_its_connect_logs_no_error(run: Callable[[Any], None]) -> None:
    """uvloop closes a socket that is given up while it connects, and tells its protocol nothing."""

    async def closed_in_each_turn() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        async with server:
            for turns in range(12):
                async with linked(f"{host}:{port}") as (channel, start):
                    call = start()
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    channel.abort()
                    assert await wait_for(call.code(), 5) is not grpc.StatusCode.OK
                    del channel, start, call
                    gc.collect()  # a future with an unread error says so when it is freed
                    await asyncio.sleep(0)

    run(closed_in_each_turn())


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Certificates of one mesh."""
    return Folder(tmp_path_factory.mktemp("certificates"), roles=("frontend",))


def tls(folder: Folder) -> ServerTls:
    """Return the TLS of a server."""
    certificate, key = ((folder.path / f"frontend.{end}").read_bytes() for end in ("pem", "key"))
    material = ServerMaterial(key=key, certificate=certificate, client_authority=None)
    return ServerTls(lambda: material, require_client=False)


def context(folder: Folder) -> ssl.SSLContext:
    """Return the TLS of a client that trusts the mesh, without a name to check."""
    made = client_context((folder.path / "authority.pem").read_bytes(), None, None)
    made.check_hostname = False
    return made


async def test_a_client_that_does_not_offer_http_2_is_closed(certificates: Folder) -> None:
    made = context(certificates)
    made.set_alpn_protocols(["http/1.1"])
    async with echoing(tls(certificates)) as (server, _, address):
        host, _, port = address.rpartition(":")
        with suppress(ConnectionError, ssl.SSLError):
            reader, writer = await asyncio.open_connection(host, int(port), ssl=made)
            assert await wait_for(reader.read(), 5) == b""
            writer.close()
            await writer.wait_closed()
        await until(lambda: not server._connections)


@pytest.mark.parametrize("data", [b"", b"\x16\x03\x01\x02\0\1\0", b"GET / HTTP/1.1\r\n\r\n", bytes(100)])
async def test_a_peer_that_vanishes_in_the_handshake_leaves_nothing(
    certificates: Folder, data: bytes
) -> None:
    async with echoing(tls(certificates)) as (server, _, address):
        host, _, port = address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        await until(lambda: bool(server._connections) or bool(data))
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()
        await until(lambda: not server._connections and not server._listener.arriving)


async def test_a_broken_record_ends_a_connection_with_output_on_its_way(certificates: Folder) -> None:
    """Waiting output cannot be encrypted any more. The end of the connection is no error of the event loop."""
    async with echoing(tls(certificates)) as (server, _, address):
        link_tls = LinkTls(context(certificates), "frontend")
        channel = LinkChannel(address, link_tls, message_bytes_max=-1, limits=LIMITS)
        call = channel.stream_stream(f"/{SERVICE}/Both", bytes, bytes)()
        await call.write(b"x")
        assert await wait_for(call.read(), 10) == b"x"
        (connection,) = server._connections  # the server's own set: no other way to this end
        connection.ping()
        connection.data_received(b"no TLS record at all")
        assert connection.is_lost
        assert await wait_for(call.read(), 10) is EOF
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        await channel.close()
