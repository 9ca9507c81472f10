"""An HTTP/1.1 server for an ASGI application, inside the process and event loop of its caller.

uvicorn's connections on the listener of the batched transport. TLS is asked for at each new connection, so renewed files
need no restart.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.server import ServerState

from kvmesh.http1.connection import Fault, HttpConnection
from kvmesh.http1.connections import Connections
from kvmesh.http1.inbox import Inbox
from kvmesh.http1.limits import READ_BYTES, HttpLimits
from kvmesh.http2.tls import ServerContexts
from kvmesh.listener import Listener
from kvmesh.trust.server_credentials import ServerTls

log = logging.getLogger(__name__)

ALPN: Final = "http/1.1"

Application = Callable[
    [Any, Callable[[], Coroutine[Any, Any, Any]], Callable[[Mapping[str, Any]], Coroutine[Any, Any, None]]],
    Coroutine[Any, Any, None],
]


class HttpListenError(OSError):
    """The address cannot be bound. The text is one sentence for the operator."""


class HttpServer:
    """See the module. `fault` makes the bodies of errors of HTTP itself."""

    def __init__(
        self, application: Application, limits: HttpLimits, fault: Fault, credentials: ServerTls | None = None
    ) -> None:
        self.connections = Connections(limits.connections_max)
        self.address = ""
        self._limits = limits
        self._fault = fault
        self._credentials = credentials
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._state = ServerState()
        self._config = Config(
            application,
            interface="asgi3",
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=limits.idle_s,  # type: ignore[arg-type]  # seconds of call_later
        )
        self._config.load()
        self._listener: Listener[ServerContexts | None] | None = None
        self._is_stopped = False

    @property
    def is_open(self) -> bool:
        """True while the server takes connections."""
        return self._listener is not None

    def listen(self, address: str) -> str:
        """Bind `host:port` (port 0: a free port), take connections, and return the address. Raises HttpListenError."""
        contexts = ServerContexts(self._credentials, ALPN) if self._credentials is not None else None
        listener: Listener[ServerContexts | None] = Listener(self._arrive, self._make_room)
        try:
            port = listener.bind(address, contexts)
        except RuntimeError as error:
            raise HttpListenError(
                f"Cannot listen on {address} (HTTP): the port is in use, or the address is not available."
            ) from error
        listener.start()
        self._listener = listener
        self.address = f"{address.rpartition(':')[0]}:{port}"
        return self.address

    async def close_listener(self) -> None:
        """Take no more connections, and close the idle ones. Requests run on. Idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()
            self.send_clients_on()

    def open_listener(self) -> None:
        """Take connections at the same address again. Raises HttpListenError. Idempotent."""
        if self._listener is None:
            self.listen(self.address)

    def send_clients_on(self) -> None:
        """Close the idle connections, and the others with the end of their response. New ones are taken."""
        for connection in list(self._open()):
            connection.shutdown()

    async def stop(self) -> None:
        """Take no more connections, and end all requests and connections. Idempotent."""
        self._is_stopped = True
        if self._listener is not None:
            self._listener.cut(0)
        await self.close_listener()
        tasks = list(self._state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self._open()):
            connection.cut()
        await self.connections.is_empty.wait()

    def _open(self) -> set[HttpConnection]:
        return {each for each in self.connections.open if isinstance(each, HttpConnection)}

    def _make_room(self) -> bool:
        """End the longest of the TLS handshakes if there are as many as connections are allowed. True: there is room."""
        if self._listener is not None:
            self._listener.cut(self._limits.connections_max - 1)
        return True

    def _made(self) -> Inbox:
        connection = HttpConnection(self._config, self._state, self._limits, self.connections, self._fault)
        return Inbox(connection, self._buffer)

    async def _arrive(self, accepted: socket.socket, contexts: ServerContexts | None) -> None:
        connect = asyncio.get_running_loop().connect_accepted_socket
        if contexts is None:
            await connect(self._made, accepted)
            return
        try:
            await connect(
                self._made, accepted, ssl=contexts.context(), ssl_handshake_timeout=self._limits.handshake_s
            )
        except (OSError, ssl.SSLError) as error:  # each client can cause it
            log.debug("a TLS handshake failed", extra={"why": str(error)})
