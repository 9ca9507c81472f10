"""A small application on the HTTP server, and clients that send bytes of their choice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvmesh.http1.limits import HttpLimits
from kvmesh.http1.server import HttpServer
from kvmesh.trust.server_credentials import ServerTls
from tests.patience import patience, wait_for
from tests.raw_http1 import BOUND_S, Client, connected, get


def fault(status: int, text: str, code: str) -> bytes:
    """Make the body of an error of HTTP itself, as the frontend does."""
    return msgspec.json.encode({"error": {"message": text, "type": "x", "param": None, "code": code}})


class Site:
    """The application. The path of a request chooses what it does."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        """Paths of all requests, in order."""
        self.bodies: list[bytes] = []
        self.gone = 0
        """Requests whose client disconnected."""
        self.running = 0
        self.sent = 0
        """Bytes that the server took of `/flood`."""
        self.names: Any = None
        self.go = asyncio.Event()
        """`/later` answers once it is set."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        path = scope["path"]
        self.paths.append(path)
        self.running += 1
        try:
            await self._answer(path, scope, receive, send)
        finally:
            self.running -= 1

    async def _answer(self, path: str, scope: Any, receive: Any, send: Any) -> None:
        answer = path.encode()
        if path == "/echo":
            parts = []
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.gone += 1
                    return
                parts.append(message["body"])
                if not message["more_body"]:
                    break
            answer = b"".join(parts)
            self.bodies.append(answer)
        elif path == "/watch":
            await _gone(receive)
            self.gone += 1
            return
        elif path == "/later":
            await self.go.wait()
        elif path == "/bug":
            raise ValueError("secret internals")
        elif path == "/big":
            answer = bytes(16 << 20)
        elif path == "/names":
            self.names = scope.get("extensions")
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [] if path == "/flood" else [(b"content-length", b"%d" % len(answer))],
            }
        )
        if path == "/half":
            await send({"type": "http.response.body", "body": answer[:1], "more_body": True})
            return
        if path == "/flood":
            watch = asyncio.create_task(_gone(receive))
            while not watch.done():
                await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
                self.sent += 1 << 16
                await asyncio.sleep(0)
            self.gone += 1
            return
        await send({"type": "http.response.body", "body": answer, "more_body": False})


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass
class Serving:
    """A running server with its application."""

    server: HttpServer
    site: Site
    clients: list[Client] = field(default_factory=list)

    async def connect(self, data: bytes = b"", receive_buffer: int = 0) -> Client:
        """Return a new client that has sent `data`."""
        client = await connected(self.server.address, receive_buffer)
        self.clients.append(client)
        client.send(data)
        return client

    def leave(self) -> None:
        """Cut all clients."""
        for client in self.clients:
            client.writer.transport.abort()

    async def until_open(self, count: int) -> None:
        """Wait until the server has `count` connections."""
        await until(lambda: len(self.server.connections) == count)


async def until(condition: Any) -> None:
    """Let the loop turn until `condition`. Raises TimeoutError."""
    async with patience(BOUND_S):
        while not condition():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(tls: ServerTls | None = None, **limits: Any) -> AsyncIterator[Serving]:
    """Serve a site. At the end a bystander is served, and no connection, request, task or error is left."""
    loop = asyncio.get_running_loop()
    errors: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: errors.append(context))
    tasks = asyncio.all_tasks()
    site = Site()
    known = {"connections_max": 100, "head_s": 10.0, "handshake_s": 10.0} | limits
    server = HttpServer(site, HttpLimits(**known), fault, tls)
    server.listen("127.0.0.1:0")
    made = Serving(server, site)
    try:
        yield made
        if tls is None and server.is_open:
            bystander = await made.connect(get("/here", "connection: close"))
            assert (await bystander.rest()).endswith(b"/here")
        made.leave()
        await made.until_open(0)
        await until(lambda: not site.running)
    finally:
        made.leave()
        await wait_for(server.stop(), BOUND_S)
    await until(lambda: asyncio.all_tasks() <= tasks)
    assert not errors, errors
