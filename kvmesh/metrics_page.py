"""Reads a page /metrics over HTTP: of a process of the mesh, or of a Triton server."""

from __future__ import annotations

import asyncio
from typing import Final

BYTES_MAX: Final = 4 << 20
"""Longest page, unless the caller says otherwise."""

TIMEOUT_S: Final = 1.0
HEAD_BYTES_MAX: Final = 16 << 10
LENGTH_DIGITS_MAX: Final = 9
PART_BYTES: Final = 64 << 10


class NoMetrics(Exception):
    """The page could not be read. The text is the reason, without the address."""


async def read_page(address: str, timeout_s: float = TIMEOUT_S, *, bytes_max: int = BYTES_MAX) -> bytes:
    """Return the page of the server at `address`, "host:port". Raises NoMetrics.

    `timeout_s`: longest time until the page is complete. `bytes_max`: a longer page is refused.
    """
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=HEAD_BYTES_MAX)
            try:
                # HTTP/1.0: the server closes the connection behind the page, and does not cut it into chunks.
                writer.write(f"GET /metrics HTTP/1.0\r\nHost: {address}\r\n\r\n".encode())
                length = _length(await _head(reader), bytes_max)
                if length is None:
                    return await _to_end(reader, bytes_max)
                return await reader.readexactly(length)
            finally:
                writer.close()
    except TimeoutError:
        raise NoMetrics(f"no answer within {timeout_s:g} s") from None
    except asyncio.IncompleteReadError as error:
        raise NoMetrics(f"the page ends after {len(error.partial)} of {error.expected} bytes") from None
    except OSError as error:
        raise NoMetrics(error.strerror or type(error).__name__) from error


async def _head(reader: asyncio.StreamReader) -> bytes:
    """Return the head of an answer with a page."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise NoMetrics(f"the head of the answer is longer than {HEAD_BYTES_MAX} bytes") from None
    except asyncio.IncompleteReadError as error:
        raise NoMetrics(f"the answer is {_status(error.partial)!r}") from None
    if " 200" not in _status(head):
        raise NoMetrics(f"the answer is {_status(head)!r}")
    return head


def _status(head: bytes) -> str:
    return head.split(b"\r\n", 1)[0].decode("latin-1")[:80]


def _length(head: bytes, bytes_max: int) -> int | None:
    """Return the length of the page. Triton keeps the connection of a client that asks with HTTP/1.0 open."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit():
            text = value.strip()
            if len(text) > LENGTH_DIGITS_MAX or int(text) > bytes_max:
                raise _too_long(bytes_max)
            return int(text)
    return None


async def _to_end(reader: asyncio.StreamReader, bytes_max: int) -> bytes:
    """Return a page without a length."""
    page = bytearray()
    while part := await reader.read(PART_BYTES):
        page += part
        if len(page) > bytes_max:
            raise _too_long(bytes_max)
    return bytes(page)


def _too_long(bytes_max: int) -> NoMetrics:
    return NoMetrics(f"the page is longer than {bytes_max} bytes")
