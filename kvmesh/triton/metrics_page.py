"""Reads the page /metrics of a Triton server over HTTP."""

from __future__ import annotations

import asyncio
from typing import Final

from kvmesh.triton.server_metrics import PAGE_BYTES_MAX

TIMEOUT_S: Final = 1.0
_HEAD_BYTES_MAX: Final = 16 << 10


class NoMetrics(Exception):
    """The page could not be read. The text is the reason, without the address."""


async def read_page(address: str, timeout_s: float = TIMEOUT_S) -> bytes:
    """Return the page of the server at `address`, "host:port". Raises NoMetrics."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                # HTTP/1.0: the server closes the connection behind the page, and does not cut it into chunks.
                writer.write(f"GET /metrics HTTP/1.0\r\nHost: {address}\r\n\r\n".encode())
                return await _read(reader)
            finally:
                writer.close()
    except TimeoutError:
        raise NoMetrics(f"no answer within {timeout_s:g} s") from None
    except OSError as error:
        raise NoMetrics(error.strerror or type(error).__name__) from error


async def _read(reader: asyncio.StreamReader) -> bytes:
    received = bytearray()
    limit = PAGE_BYTES_MAX + _HEAD_BYTES_MAX
    while part := await reader.read(64 << 10):
        received += part
        if len(received) > limit:
            raise NoMetrics(f"the page is longer than {PAGE_BYTES_MAX} bytes")
        if _is_complete(received):
            break
    head, separator, page = bytes(received).partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0].decode("latin-1")[:80]
    if not separator or " 200" not in status:
        raise NoMetrics(f"the answer is {status!r}")
    return page


def _is_complete(received: bytearray) -> bool:
    """Return whether the page is there. Triton keeps the connection of a client that asks with HTTP/1.0 open."""
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return False
    for line in bytes(received[:end]).split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit():
            return len(received) - end - 4 >= int(value)
    return False
