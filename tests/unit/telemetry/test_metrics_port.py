"""The metrics port over real sockets, on asyncio's loop and on uvloop's: bad clients, its end, and bugs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
import uvloop

from kvmesh import metrics_port
from kvmesh.advertise import AS_LISTENED
from kvmesh.config import MeshConfig
from kvmesh.metrics import Metrics, open_fds
from kvmesh.metrics_answers import HEAD_BYTES_MAX
from kvmesh.metrics_page import read_page
from kvmesh.metrics_port import exposed
from kvmesh.service_options import ServiceOptions
from tests.patience import patience, wait_for

GET = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"
HANGING = (b"", b"GET /metrics HTTP/1.1\r\n", GET % b"/metrics")
"""What clients send that hang: nothing, half a request, and the request of a page that they do not read."""

LARGE = 32 << 20
"""Bytes of a page that no socket buffer holds."""


Run = Callable[[Coroutine[Any, Any, None]], None]

ON_BOTH_LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
"""Processes run on uvloop, most tests on asyncio's loop."""


class LargeMetrics(Metrics):
    """Metrics with a large page."""

    def text(self) -> bytes:
        return bytes(LARGE)


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def asked(address: str, request: bytes, *, ends: bool = True) -> bytes:
    """Return all that the port answers until it closes the connection."""
    async with connected(address) as (reader, writer):
        writer.write(request)
        if ends:
            writer.write_eof()
        return await wait_for(reader.read(), 5)


@ON_BOTH_LOOPS
def test_the_pages_are_served_beside_bad_clients(run: Run) -> None:
    """A client that disconnects, waits or sends too much affects no other one."""
    run(serve_beside_bad_clients())


async def serve_beside_bad_clients() -> None:
    metrics = Metrics("decode")
    metrics.process_gauges()
    metrics.counter("tokens", "Tokens.").value += 5
    async with exposed(metrics, lambda: "the process drains", "127.0.0.1", 0) as address:
        async with connected(address) as (_, half):
            half.write(b"GET /metrics HTTP/1.1\r\n")
            assert await asked(address, b"GET /met") == b""
            assert await asked(address, b"") == b""
            answer = await asked(address, b"x" * (40 * HEAD_BYTES_MAX))
            assert answer.startswith(b"HTTP/1.1 431 ")
            page = await asked(address, GET % b"/metrics", ends=False)
        ready, live = [await asked(address, GET % path, ends=False) for path in (b"/readyz", b"/healthz")]
    head, _, body = page.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=")
    assert b"kvmesh_decode_tokens_total 5.0" in body
    assert b"kvmesh_decode_process_tasks" in body
    assert ready.startswith(b"HTTP/1.1 503 ") and ready.endswith(b"\r\n\r\nthe process drains\n")
    assert live.startswith(b"HTTP/1.1 200 ") and live.endswith(b"\r\n\r\nok\n")


async def test_an_ipv6_address_is_shown_in_brackets() -> None:
    """As the listen address of a process in a network of IPv6 alone."""
    options = ServiceOptions(MeshConfig(), "decode-0", "[::1]:7000", "redis://x", 0, AS_LISTENED)
    metrics = Metrics("decode")
    metrics.process_gauges()
    async with exposed(metrics, lambda: "", options.host, 0) as address:
        assert address.startswith("[::1]:")
        assert b"kvmesh_decode_process_tasks" in await read_page(address)


async def test_a_request_in_single_bytes_is_answered_once() -> None:
    """Requests behind the first one are ignored."""
    async with (
        exposed(Metrics("decode"), lambda: "", "127.0.0.1", 0) as address,
        connected(address) as (reader, writer),
    ):
        for byte in GET % b"/healthz" * 2:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)  # one turn of the loop: each byte is a part of its own
        answer = await wait_for(reader.read(), 5)
    assert answer.count(b"HTTP/1.1") == 1 and answer.endswith(b"\r\n\r\nok\n")


@ON_BOTH_LOOPS
def test_a_large_page_arrives_whole(run: Run) -> None:
    """The connection is not closed before the page has left."""
    run(read_a_large_page())


async def read_a_large_page() -> None:
    async with exposed(LargeMetrics("decode"), lambda: "", "127.0.0.1", 0) as address:
        answer = await asked(address, GET % b"/metrics", ends=False)
    assert len(answer.partition(b"\r\n\r\n")[2]) == LARGE


@ON_BOTH_LOOPS
@pytest.mark.parametrize("request_", HANGING)
def test_a_client_that_hangs_is_cut_off(run: Run, request_: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends nothing, or half a request, or reads nothing of a large page."""
    monkeypatch.setattr(metrics_port, "CONNECTION_S_MAX", 0.02)
    run(hang_until_cut_off(request_))


async def hang_until_cut_off(request_: bytes) -> None:
    async with exposed(LargeMetrics("decode"), lambda: "", "127.0.0.1", 0) as address:
        descriptors = open_fds()
        async with connected(address) as (reader, writer):
            writer.write(request_)
            if request_.endswith(b"\r\n\r\n"):
                await wait_for(reader.readexactly(1), 5)  # its page has begun
            else:
                assert await wait_for(reader.read(), 5) == b""
            async with patience(5):
                while open_fds() > descriptors + 1:  # the end of the port is still open
                    await asyncio.sleep(0)
            assert await rest_of(reader) < LARGE


@ON_BOTH_LOOPS
def test_nothing_is_left_when_the_port_closes(run: Run) -> None:
    """Clients in every phase lose their connections at once: no task and no descriptor stays."""
    run(close_beside_hanging_clients())


async def close_beside_hanging_clients() -> None:
    async with exposed(Metrics("decode"), lambda: "", "127.0.0.1", 0):
        pass  # the first port of a loop leaves a descriptor to uvloop
    tasks, descriptors = asyncio.all_tasks(), open_fds()
    async with AsyncExitStack() as clients:
        async with exposed(LargeMetrics("decode"), lambda: "", "127.0.0.1", 0) as address:
            hanging = [await clients.enter_async_context(connected(address)) for _ in HANGING]
            for (_, writer), request in zip(hanging, HANGING, strict=True):
                writer.write(request)
            await wait_for(hanging[-1][0].readexactly(1), 5)  # its page has begun
        assert asyncio.all_tasks() == tasks and open_fds() == descriptors + len(hanging)
        assert [await rest_of(reader) < LARGE for reader, _ in hanging] == [True] * 3
    assert asyncio.all_tasks() == tasks and open_fds() == descriptors


@pytest.mark.parametrize("turns", range(4))
def test_a_connection_that_comes_with_the_close_is_left_nowhere(turns: int) -> None:
    """On uvloop, whether it was accepted or not. asyncio would keep one until it is collected.

    `turns`: turns of the loop between the connection and the close.
    """
    uvloop.run(connect_and_close(turns))


async def connect_and_close(turns: int) -> None:
    async with exposed(Metrics("decode"), lambda: "", "127.0.0.1", 0) as address:
        host, _, port = address.rpartition(":")
        late = socket.create_connection((host, int(port)), timeout=5)
        for _ in range(turns):
            await asyncio.sleep(0)
    with late:
        late.setblocking(False)
        with suppress(ConnectionError):
            assert await wait_for(asyncio.get_running_loop().sock_recv(late, 1), 2) == b""


async def rest_of(reader: asyncio.StreamReader) -> int:
    """Read to the end of the connection; return the number of bytes."""
    count = 0
    with suppress(ConnectionError):
        while part := await wait_for(reader.read(1 << 20), 5):
            count += len(part)
    return count


async def test_a_bug_in_a_page_ends_its_connection_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the error, the client none of its text, and the other pages go on."""

    def bug() -> str:
        raise ValueError("secret internals")

    async with exposed(Metrics("decode"), bug, "127.0.0.1", 0) as address:
        answer = await asked(address, GET % b"/readyz", ends=False)
        assert answer.startswith(b"HTTP/1.1 500 ") and b"secret" not in answer
        assert "secret internals" in caplog.text
        assert (await asked(address, GET % b"/healthz", ends=False)).startswith(b"HTTP/1.1 200 ")


async def test_a_port_in_use_is_an_error() -> None:
    """Two processes cannot share it."""
    async with exposed(Metrics("decode"), lambda: "", "127.0.0.1", 0) as address:
        with pytest.raises(OSError, match=r"in use"):
            async with exposed(Metrics("decode"), lambda: "", "127.0.0.1", int(address.rpartition(":")[2])):
                raise AssertionError("the port is shared")
