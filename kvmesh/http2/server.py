"""A gRPC server on asyncio with the interface of grpc.aio.Server, and the batched edge below it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import grpc

from kvmesh.clock import MonotonicClock
from kvmesh.http2.codec import CodecLimits
from kvmesh.http2.connection import CONNECTION_WINDOW, ConnectionLimits
from kvmesh.http2.direct_codec import DirectCodec
from kvmesh.http2.input_turns import InputTurns, call_soon
from kvmesh.http2.server_connection import CallLimits, ServerConnection
from kvmesh.http2.tls import ServerContexts, TlsEnd
from kvmesh.listener import Listener
from kvmesh.trust.server_credentials import ServerTls

CLOSING_TURNS: Final = 4
"""Turns of the event loop in which asyncio accepts or closes a connection."""

_STOPPED: Final = "the server stops"


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeLimits:
    """Limits of a server on its clients."""

    calls: CallLimits
    connections: ConnectionLimits
    connections_max: int


class _Details:
    """What interceptors see of a call: the method. They decide by the method alone, once for all of its calls."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


class BatchedServer:
    """Serves registered methods. The names and meanings of its methods are those of grpc.aio.Server."""

    def __init__(
        self, interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]], limits: EdgeLimits
    ) -> None:
        self._interceptors = tuple(interceptors)
        self._limits = limits
        self._codec_limits = CodecLimits(
            streams_max=limits.calls.streams_max,
            header_bytes_max=limits.calls.metadata_bytes_max,
            connection_window=CONNECTION_WINDOW,
        )
        self._methods: dict[bytes, Any] = {}
        self._handlers: dict[bytes, Any] = {}
        """Handlers by path, wrapped by the interceptors."""
        self._listener: Listener[ServerContexts | None] = Listener(
            self._arrive, lambda: len(self._connections) + self._listener.arriving < limits.connections_max
        )
        self._turns = InputTurns(MonotonicClock(), call_soon)
        self._connections: set[ServerConnection] = set()
        self._idle = asyncio.Event()
        """Set while no connection is open."""
        self._idle.set()
        self._stopping: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._cut_short = asyncio.Event()

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Serve the methods of `service`."""
        for name, handler in handlers.items():
            self._methods[f"/{service}/{name}".encode()] = handler

    def add_generic_rpc_handlers(self, _: Sequence[grpc.GenericRpcHandler[Any, Any]]) -> None:
        """Ignore handlers of unregistered methods: generated code registers each method as well."""

    def add_insecure_port(self, address: str) -> int:
        """Bind `host:port` without TLS, and return the port. Raises RuntimeError."""
        return self._bind(address, None)

    def add_secure_port(self, address: str, credentials: ServerTls) -> int:
        """Bind `host:port` with TLS, and return the port. Raises RuntimeError, or ssl.SSLError for unusable files."""
        return self._bind(address, ServerContexts(credentials))

    def _bind(self, address: str, contexts: ServerContexts | None) -> int:
        return self._listener.bind(address, contexts)

    async def start(self) -> None:
        """Wrap the handlers by the interceptors, and take connections."""
        for path, handler in self._methods.items():
            self._handlers[path] = await self._intercepted(path.decode(), handler)
        self._listener.start()

    def send_clients_on(self) -> None:
        """Tell the clients of all connections to open new ones (GOAWAY). Calls run on, and new connections are taken."""
        for connection in list(self._connections):
            connection.drain()

    async def stop(self, grace: float | None) -> None:
        """Take no more connections and calls (GOAWAY), and end those that are open after `grace` seconds."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(), name="edge-stop")
        if not grace:
            self._cut_short.set()
        waiting = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait((waiting,), timeout=grace or None)
        finally:
            waiting.cancel()
        self._cut_short.set()
        await self._stopping

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        """Return when the server has stopped, or after `timeout` seconds. Return True if the time was over."""
        try:
            async with asyncio.timeout(timeout):
                await self._stopped.wait()
        except TimeoutError:
            return True
        return False

    async def _intercepted(self, method: str, handler: Any) -> Any:
        async def innermost(_: Any) -> Any:
            return handler

        continuation: Callable[[Any], Any] = innermost
        for each in reversed(self._interceptors):
            continuation = partial(each.intercept_service, continuation)
        return await continuation(_Details(method))

    async def _arrive(self, accepted: socket.socket, contexts: ServerContexts | None) -> None:
        make = partial(self._connection, contexts)
        await asyncio.get_running_loop().connect_accepted_socket(make, accepted)

    def _connection(self, contexts: ServerContexts | None) -> ServerConnection:
        tls = None if contexts is None else TlsEnd(contexts.context(), is_server=True)
        return ServerConnection(
            DirectCodec(self._codec_limits, is_client=False),
            self._limits.connections,
            self._limits.calls,
            tls,
            self._handlers.get,
            self._on_made,
            self._on_lost,
            self._turns,
        )

    def _on_made(self, connection: ServerConnection) -> bool:
        if self._stopping is not None or len(self._connections) >= self._limits.connections_max:
            return False
        self._connections.add(connection)
        self._idle.clear()
        return True

    def _on_lost(self, connection: ServerConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._idle.set()

    async def _stop(self) -> None:
        await self._listener.close()
        for connection in list(self._connections):
            connection.drain()
        cut_short = asyncio.create_task(self._cut_short.wait())
        idle = asyncio.create_task(self._idle.wait())
        try:
            await asyncio.wait((cut_short, idle), return_when=asyncio.FIRST_COMPLETED)
        finally:
            cut_short.cancel()
            idle.cancel()
        tasks = []
        for connection in list(self._connections):
            tasks += connection.tasks()
            connection.end_calls(grpc.StatusCode.UNAVAILABLE, _STOPPED)
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self._connections):
            connection.close(_STOPPED)
        # Connections that the kernel had accepted before, and sockets that just closed, end in the next turns.
        for _ in range(CLOSING_TURNS):
            await asyncio.sleep(0)
        self._stopped.set()
