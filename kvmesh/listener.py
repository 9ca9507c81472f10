"""Listening sockets: binds addresses, and takes connections within a limit, without a task for each port.

A failed accept, for example without free file handles, pauses a port, and ends nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

log = logging.getLogger(__name__)

Kind = TypeVar("Kind")

BACKLOG: Final = 1_024
"""Connections that the kernel accepts before the server does."""

ACCEPTS: Final = 8
"""Most connections that are taken in one turn of the event loop."""

ACCEPT_PAUSE_S: Final = 0.1
"""Pause after a failed accept, for example without free file handles."""


class Listener(Generic[Kind]):
    """The ports of one server. Each has a value of type Kind, for example its TLS.

    `arrive(socket, kind)` makes a connection of an accepted socket, and may raise OSError and ssl.SSLError. `has_room()`:
    False closes a new connection at once.
    """

    def __init__(
        self, arrive: Callable[[socket.socket, Kind], Awaitable[None]], has_room: Callable[[], bool]
    ) -> None:
        self._arrive = arrive
        self._has_room = has_room
        self._ports: list[tuple[socket.socket, Kind]] = []
        self._arriving: dict[asyncio.Task[None], None] = {}
        """The longest arriving one first."""
        self._is_closed = False

    def bind(self, address: str, kind: Kind) -> int:
        """Bind `host:port`, port 0 for a free one, and return the port. Raises RuntimeError."""
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        bound, first = 0, len(self._ports)
        try:
            found = socket.getaddrinfo(
                host or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, kind_of_socket, protocol, _, where in dict.fromkeys(found):
                listening = socket.socket(family, kind_of_socket, protocol)
                self._ports.append((listening, kind))
                listening.setblocking(False)
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != "::")
                listening.bind((where[0], bound or where[1], *where[2:]))
                listening.listen(BACKLOG)
                bound = listening.getsockname()[1]
        except (OSError, ValueError) as error:
            for listening, _ in self._ports[first:]:
                listening.close()
            del self._ports[first:]
            raise RuntimeError(f"Failed to bind to address {address}: {error}") from error
        return bound

    def start(self) -> None:
        """Take connections from now on."""
        for listening, kind in self._ports:
            self._listen(listening, kind)

    async def close(self) -> None:
        """Take no more connections, and return when those that were accepted have been made."""
        self._is_closed = True
        for listening, _ in self._ports:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        await asyncio.gather(*self._arriving, return_exceptions=True)

    def cut(self, most: int) -> None:
        """End the arrival of connections, the longest arriving ones first, until `most` are arriving."""
        for arriving in list(self._arriving)[: max(0, len(self._arriving) - most)]:
            arriving.cancel()
            self._forget(arriving)

    def _listen(self, listening: socket.socket, kind: Kind) -> None:
        if not self._is_closed:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening, kind)

    def _accept(self, listening: socket.socket, kind: Kind) -> None:
        """Take the connections that wait, ACCEPTS of them at most in one turn."""
        for _ in range(ACCEPTS):
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # for example without free file handles
                log.warning("cannot accept connections", extra={"why": str(error)})
                loop = asyncio.get_running_loop()
                loop.remove_reader(listening)
                loop.call_later(ACCEPT_PAUSE_S, self._listen, listening, kind)
                return
            if not self._has_room():
                accepted.close()
                continue
            accepted.setblocking(False)
            arriving = asyncio.create_task(self._made(accepted, kind), name="edge-arrive")
            self._arriving[arriving] = None
            arriving.add_done_callback(self._forget)

    def _forget(self, arriving: asyncio.Task[None]) -> None:
        self._arriving.pop(arriving, None)

    @property
    def arriving(self) -> int:
        """Accepted connections that are being made, for example in their TLS handshake."""
        return len(self._arriving)

    async def _made(self, accepted: socket.socket, kind: Kind) -> None:
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._arrive(accepted, kind)
        except (OSError, ssl.SSLError) as error:
            log.warning("a connection failed", extra={"why": str(error)})
            accepted.close()
