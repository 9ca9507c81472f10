"""The reader of a page /metrics: complete pages, and servers that answer badly or never."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from kvmesh.metrics_page import BYTES_MAX, NoMetrics, read_page

PAGE = b'queued_requests{role="router"} 3\n'

Answer = Callable[[asyncio.StreamWriter], None]


@asynccontextmanager
async def served(answer: Answer) -> AsyncIterator[str]:
    """Serve one answer to each request at an address."""

    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        answer(writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        for writer in writers:
            writer.transport.abort()
        server.close()
        await server.wait_closed()


async def test_a_page_is_read_with_its_length_or_to_its_end() -> None:
    """Triton keeps the connection open behind the page."""
    for length, closes in ((f"Content-Length: {len(PAGE)}\r\n", False), ("", True)):

        def answer(writer: asyncio.StreamWriter, length: str = length, closes: bool = closes) -> None:
            writer.write(f"HTTP/1.1 200 OK\r\n{length}\r\n".encode() + PAGE)
            if closes:
                writer.close()

        async with served(answer) as address:
            assert await read_page(address) == PAGE


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda writer: writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"), "404"),
        (lambda writer: writer.close(), "the answer is ''"),
        (lambda _: None, "no answer within 0.05 s"),
        (lambda writer: writer.write(b"x" * (20 << 10)), "head of the answer is longer than 16384"),
        (
            lambda writer: writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: 9999999\r\n\r\n"),
            "page is longer",
        ),
        (
            lambda writer: writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: %s\r\n\r\n" % (b"9" * 9000)),
            "longer",
        ),
        (
            lambda writer: writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * (BYTES_MAX + 1)),
            "page is longer",
        ),
        (
            lambda writer: (writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\nx"), writer.close()),
            "page ends after 1 of 9",
        ),
    ],
)
async def test_a_page_that_cannot_be_read_has_a_reason(answer: Answer, reason: str) -> None:
    """A server without metrics, one that hangs, and one that never ends."""
    async with served(answer) as address:
        with pytest.raises(NoMetrics, match=reason):
            await read_page(address, 0.05 if "within" in reason else 5.0)


async def test_a_caller_bounds_the_page() -> None:
    """The page may be as long as the bound, with and without its length."""
    for head in (f"Content-Length: {len(PAGE)}\r\n", ""):

        def answer(writer: asyncio.StreamWriter, head: str = head) -> None:
            writer.write(f"HTTP/1.1 200 OK\r\n{head}\r\n".encode() + PAGE)
            writer.close()

        async with served(answer) as address:
            assert await read_page(address, bytes_max=len(PAGE)) == PAGE
            with pytest.raises(NoMetrics, match=f"longer than {len(PAGE) - 1} bytes"):
                await read_page(address, bytes_max=len(PAGE) - 1)


async def test_no_server_is_a_reason() -> None:
    """The page of a closed port."""
    async with served(lambda _: None) as address:
        pass
    with pytest.raises(NoMetrics, match="Connect call failed"):
        await read_page(address)
