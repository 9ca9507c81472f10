"""A client of HTTP/1.1 that sends bytes of its choice."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from tests.patience import patience

BOUND_S = 5.0
"""Bound of each wait."""


@dataclass
class Client:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    received: bytearray = field(default_factory=bytearray)

    def send(self, data: bytes) -> None:
        """Send bytes, as far as the server takes them."""
        self.writer.write(data)

    async def flood(self, piece: bytes) -> None:
        """Send `piece` again and again, until the server answers or closes the connection."""
        answer = asyncio.create_task(self.reader.read(1 << 16))
        with suppress(OSError):
            while not answer.done():
                self.writer.write(piece)
                await self.writer.drain()
                await asyncio.sleep(0)
        with suppress(ConnectionError):
            self.received += await answer

    async def until(self, end: bytes) -> bytes:
        """Return all that was received, once `end` is in it."""
        async with patience(BOUND_S):
            while end not in self.received:
                data = await self.reader.read(1 << 16)
                assert data, f"closed, with {bytes(self.received[-300:])!r}"
                self.received += data
        return bytes(self.received)

    async def rest(self) -> bytes:
        """Return all that was received until the server closed the connection. Raises ConnectionError after a reset."""
        async with patience(BOUND_S):
            while data := await self.reader.read(1 << 16):
                self.received += data
        return bytes(self.received)

    async def closed(self) -> bytes:
        """Return all that was received until the connection was closed or reset."""
        with suppress(ConnectionError):
            await self.rest()
        return bytes(self.received)

    async def error(self) -> tuple[int, str]:
        """Return status and code of the error that is the last response before the end of the connection."""
        head, _, body = (await self.rest()).rpartition(b"\r\n\r\n")
        assert b"connection: close" in head, head
        found = msgspec.json.decode(body)["error"]
        assert set(found) == {"message", "type", "param", "code"}
        assert found["message"]
        return int(head.rpartition(b"HTTP/1.1 ")[2][:3]), found["code"]


async def connected(address: str, receive_buffer: int = 0) -> Client:
    """Return a client of `host:port`. `receive_buffer`: size of its buffer in the kernel; 0: the usual one."""
    host, _, port = address.rpartition(":")
    plain = socket.socket()
    plain.setblocking(False)
    if receive_buffer:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    try:
        await asyncio.get_running_loop().sock_connect(plain, (host, int(port)))
    except BaseException:
        plain.close()
        raise
    reader, writer = await asyncio.open_connection(sock=plain)
    return Client(reader, writer)


def get(path: str, *headers: str) -> bytes:
    """Return a request without a body."""
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


def post(path: str, body: bytes, *headers: str) -> bytes:
    """Return a request with `body`."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body
