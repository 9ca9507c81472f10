"""The server of a service, on either transport: health checks, connection limits, graceful shutdown. Also opens channels.

A service's main builds a `MeshServer` and registers its servicers on `.grpc`. It calls `listen`, opens its connections,
and then calls `run`. No decisions are made here.

A server whose listener is closed and opened again registers its servicers with `register`, because each gRPC server listens
once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, cast

import grpc
import uvloop
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from kvmesh.aio_server import aio_server
from kvmesh.attach import outbox as attach
from kvmesh.health import HEALTH_SERVICE, HealthServicer
from kvmesh.heap import keep_trimmed
from kvmesh.http2.client import LinkChannel, LinkTls
from kvmesh.http2.connection import ConnectionLimits
from kvmesh.http2.server import BatchedServer, EdgeLimits
from kvmesh.http2.server_connection import CallLimits
from kvmesh.interceptors import ErrorInterceptor
from kvmesh.metrics import resident_bytes
from kvmesh.request_reader import RequestReader, RequestReaderInterceptor
from kvmesh.tasks import end
from kvmesh.trust.server_credentials import ServerTls

log = logging.getLogger(__name__)

GRPCIO: Final = "grpcio"
"""The transport of grpc.aio."""

BATCHED: Final = "batched"
"""The transport of kvmesh.http2: one write per connection and turn of the event loop."""

DRAIN_S: Final = 30.0
"""Longest drain: the wait for running requests at a graceful shutdown. Requests that still run then are cancelled."""

CLOSED_GRACE_S: Final = 24 * 3600.0
"""Time for streams to end after the listener was closed: streams are not cut. `run` ends them at a graceful shutdown."""

STOP_GRACE_S: Final = 1.0
"""Time for streams to end after a drain, before their calls are cancelled."""

STARTS: Final = "the process starts"
DRAINS: Final = "the process drains"
PAUSES: Final = "the process does not serve"
"""Reason of a process that has served before, and gave no other reason."""


# Only keepalive pings find a frozen peer (SIGSTOP, a lost host). keepalive_timeout_ms is not enough. Without
# ping_timeout_ms a frozen peer was found only after 30 s (measured once, by hand).
def _keepalive(every_s: float) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.keepalive_time_ms", round(every_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(every_s * 2000)),
        ("grpc.http2.ping_timeout_ms", round(every_s * 2000)),
        ("grpc.http2.max_pings_without_data", 0),
    )


LINK_KEEPALIVE_S: Final = 1.0
"""Keepalive of links inside the mesh."""

METADATA_BYTES_MAX: Final = 8_192
"""Limit on the metadata of a call, once the client has acknowledged it. Before that, gRPC allows 16 MB in any case."""

HANDSHAKE_S: Final = 10.0
"""Time for the TLS handshake of a new connection."""

SETTINGS_S: Final = 10.0
"""Time for a client to acknowledge the limits of its connection, after the TLS handshake if there is one.

gRPC's own default is at least a minute.
"""

SERVER_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # a second process on the same port must fail, not share the port
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 200),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1000)),
    ("grpc.http2.settings_timeout", round(SETTINGS_S * 1000)),
    # BDP probing lets a caller send megabytes ahead of the reads. Without it, the flow-control window of a stream is 64 KB,
    # and the stated length of a message while the message is read.
    ("grpc.http2.bdp_probe", 0),
    # Overload protection refuses streams while earlier ones are being freed, even below the limit of open streams. Stock
    # clients then get UNAVAILABLE.
    ("grpc.http.overload_protection", 0),
)
"""Options of every server. The mesh's channels ping each second, which gRPC's default treats as an attack."""

CHANNEL_OPTIONS: Final = (
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Despite its name this is the deadline of one attempt to connect. A shorter one fails on a busy machine.
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),  # the frontend alone retries
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", -1),
)
"""Options of every channel between processes of the mesh."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of gRPC itself on callers, before any Python code sees their calls."""

    message_bytes_max: int = attach.MESSAGE_BYTES_MAX
    """gRPC refuses larger messages as soon as their length is known. Services have lower limits, with clearer errors."""
    connections_max: int = 4_096
    """Connection limit. Further connections are closed at once. An idle connection takes some 15 KB."""
    streams_max: int = 1_000
    """Open calls per connection. A client holds further calls back."""

    pending_max: int = 4_096
    """Calls that gRPC queues for the event loop, some 15 KB each.

    Above this limit gRPC ends a growing part of new calls with CANCELLED, without error details. At a sixteenth more it
    ends all of them.
    """

    def options(self) -> tuple[tuple[str, int], ...]:
        """Return the limits as options of gRPC."""
        return (
            ("grpc.server.max_pending_requests", self.pending_max),
            ("grpc.server.max_pending_requests_hard_limit", self.pending_max + self.pending_max // 16),
            ("grpc.max_receive_message_length", self.message_bytes_max),
            ("grpc.max_allowed_incoming_connections", self.connections_max),
            ("grpc.max_concurrent_streams", self.streams_max),
        )

    def batched(self, keepalive_s: float) -> EdgeLimits:
        """Return the limits for a batched server, with the times of its connections."""
        calls = CallLimits(
            streams_max=self.streams_max,
            message_bytes_max=self.message_bytes_max,
            metadata_bytes_max=METADATA_BYTES_MAX,
        )
        connections = ConnectionLimits(keepalive_s=keepalive_s, handshake_s=HANDSHAKE_S)
        return EdgeLimits(calls=calls, connections=connections, connections_max=self.connections_max)


class ListenError(OSError):
    """The listen address cannot be bound. The text is one sentence for the operator."""


def channel(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    name: str = "",
    *,
    message_bytes_max: int = -1,
    keepalive_s: float = 1.0,
) -> grpc.aio.Channel:
    """Return a channel to `host:port`, without TLS unless there are `credentials`. The caller must close it.

    `name`: the name that the peer's certificate must have, in place of the name in the address. `message_bytes_max`: gRPC
    refuses longer messages of the peer; -1: none. `keepalive_s`: as that of `MeshServer`.
    """
    options: tuple[tuple[str, int | str], ...] = (
        *_keepalive(keepalive_s),
        *CHANNEL_OPTIONS,
        ("grpc.max_receive_message_length", message_bytes_max),
    )
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    if name:
        options = (*options, ("grpc.ssl_target_name_override", name))
    return grpc.aio.secure_channel(address, credentials, options=options)


def link_channel(address: str, tls: LinkTls | None) -> grpc.aio.Channel:
    """Return a channel of the batched transport to `host:port`, for one Attach link. The caller must close it.

    It has the methods of grpc.aio.Channel that a link uses.
    """
    limits = ConnectionLimits(keepalive_s=LINK_KEEPALIVE_S, handshake_s=HANDSHAKE_S)
    return cast("grpc.aio.Channel", LinkChannel(address, tls, message_bytes_max=-1, limits=limits))


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run `main` on uvloop and return its exit status."""
    return uvloop.run(main)


class MeshServer:
    """The gRPC server of a process, with health, reflection and error mapping.

    State machine: BOUND after `listen`, SERVING after `set_serving(True)`, DRAINING after the first SIGTERM or SIGINT, then
    stopped. While DRAINING, health is NOT_SERVING and `drain` runs. A second signal ends the drain.
    """

    def __init__(
        self,
        role: str,
        instance: str,
        service_names: Sequence[str],
        *,
        keepalive_s: float = 1.0,
        interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
        credentials: ServerTls | None = None,
        guards: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
        limits: ServerLimits = ServerLimits(),  # frozen
        request_reader: RequestReader | None = None,
        transport: str = GRPCIO,
    ) -> None:
        """Build the server without I/O. `service_names` are the full names, for health and reflection.

        `credentials`: TLS. None: without TLS. `guards` see a call before its message, and may refuse it with a MeshError.
        `request_reader` reads the messages of calls. A servicer may use the same reader.

        Keepalive: a peer with open calls is pinged every `keepalive_s`, and dropped after twice that time without an
        answer. It is 1 s inside the mesh, and more for distant clients and for the streams of the control plane.
        """
        self._role = role
        self._instance = instance
        self._services = tuple(service_names)
        self._credentials = credentials
        self._interceptors = (
            *(*interceptors, ErrorInterceptor(), *guards),
            RequestReaderInterceptor(request_reader or RequestReader(limits.message_bytes_max)),
        )
        self._transport = transport
        self._limits = limits
        self._keepalive_s = keepalive_s
        self._health = HealthServicer()
        self._registrars: list[Callable[[grpc.aio.Server], None]] = []
        self.grpc = self._new()
        """The gRPC server. Another object after `open_listener`."""
        self.address = ""
        self._closing: dict[grpc.aio.Server, asyncio.Task[None]] = {}
        """Servers without a listener, some with streams, and the tasks that end them."""
        self._idle_bytes = 0
        """Resident memory before the first call."""
        self._is_serving = False
        self._unset_reason = STARTS
        """Why `set_serving` says that the process does not serve. Never empty."""
        self._standby_reason = ""
        self._aside_reason = ""
        self._closed_reason = ""
        self._stopping = asyncio.Event()
        self._cut_short = asyncio.Event()
        self._reopened = asyncio.Event()

    def _new(self) -> grpc.aio.Server:
        """Return a gRPC server with health, reflection and the registered servicers."""
        if self._transport == BATCHED:
            limits = self._limits.batched(self._keepalive_s)
            made = cast("grpc.aio.Server", BatchedServer(self._interceptors, limits))
        else:
            options = (*_keepalive(self._keepalive_s), *SERVER_OPTIONS, *self._limits.options())
            made = aio_server(interceptors=self._interceptors, options=options)
        self._health.register(made)
        names = (*self._services, HEALTH_SERVICE, reflection.SERVICE_NAME)
        # enable_server_reflection knows servers of grpcio alone.
        served = reflection.aio.ReflectionServicer(names)  # type: ignore[attr-defined]  # the module imports it privately
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(served, made)
        for register in self._registrars:
            register(made)
        return made

    def register(self, register: Callable[[grpc.aio.Server], None]) -> None:
        """Register a servicer by `register(server)`, also on the servers of later listeners."""
        self._registrars.append(register)
        register(self.grpc)

    @property
    def is_open(self) -> bool:
        """True while the server takes connections and calls, or has not listened yet."""
        return self.grpc not in self._closing

    async def close_listener(self, reason: str) -> None:
        """Take no more connections, and tell the clients of present ones to go (GOAWAY). Streams run on. Idempotent.

        Health is NOT_SERVING because of `reason` until `open_listener`.
        """
        if self.is_open:
            stopping = self.grpc.stop(CLOSED_GRACE_S)
            self._closing[self.grpc] = asyncio.create_task(stopping, name="closed-listener")
            self._closed_reason = reason
            await self._update_health()

    async def open_listener(self) -> None:
        """Take connections at the same address again, by a new gRPC server. Raises ListenError. Idempotent."""
        if self.is_open:
            return
        opened = self._new()
        self._bind(opened, self.address)
        await opened.start()
        self._closing = {each: task for each, task in self._closing.items() if not task.done()}
        self.grpc, self._closed_reason = opened, ""
        self._reopened.set()
        await self._update_health()

    def send_clients_on(self) -> None:
        """Send new calls of the present connections to new ones (GOAWAY). Streams run on, and new connections are taken.

        A client behind a load balancer so reaches another process. One with this address alone comes back. With grpcio
        nothing happens: a server of it sends GOAWAY only when it closes its listener.
        """
        if self._transport == BATCHED:
            cast("BatchedServer", self.grpc).send_clients_on()

    async def listen(self, address: str) -> str:
        """Bind `host:port` (port 0: a free port), start, and return the address. Health is NOT_SERVING.

        Raises ListenError if the address cannot be bound.
        """
        host, port = address.rpartition(":")[0], self._bind(self.grpc, address)
        await self.set_serving(False)
        self._idle_bytes = resident_bytes()
        await self.grpc.start()
        self.address = f"{host}:{port}"
        return self.address

    def _bind(self, server: grpc.aio.Server, address: str) -> int:
        """Bind `address`, and return the port. Raises ListenError."""
        try:
            if self._credentials is None:
                return server.add_insecure_port(address)
            if self._transport == BATCHED:
                return cast("BatchedServer", server).add_secure_port(address, self._credentials)
            return server.add_secure_port(address, self._credentials.grpc_credentials())
        except RuntimeError as error:
            raise ListenError(
                f"Cannot listen on {address}: the port is in use, or the address is not available."
            ) from error

    async def set_serving(self, is_serving: bool, reason: str = "") -> None:
        """Set the health status of the process and of each of its services. `reason`: why it does not serve, if known."""
        self._is_serving = is_serving
        if is_serving:
            self._unset_reason = PAUSES
        elif reason:
            self._unset_reason = reason
        await self._update_health()

    async def stand_by(self, reason: str) -> None:
        """Become a standby: NOT_SERVING because of `reason`, whatever `set_serving` sets. An empty `reason` ends it."""
        self._standby_reason = reason
        await self._update_health()

    async def set_aside(self, reason: str) -> None:
        """Set the process aside: NOT_SERVING because of `reason`, whatever `set_serving` sets. Empty: it serves again."""
        self._aside_reason = reason
        await self._update_health()

    @property
    def unready_reason(self) -> str:
        """Why health is NOT_SERVING, for people. Empty exactly while it is SERVING."""
        if self._stopping.is_set():
            return DRAINS
        reason = self._standby_reason or self._aside_reason or self._closed_reason
        return reason or ("" if self._is_serving else self._unset_reason)

    async def _update_health(self) -> None:
        self._health.reason = self.unready_reason
        state = (
            health_pb2.HealthCheckResponse.NOT_SERVING
            if self._health.reason
            else health_pb2.HealthCheckResponse.SERVING
        )
        for service in ("", *self._services):
            await self._health.set(service, state)

    def announce(self, metrics_address: str, more: Mapping[str, str] = MappingProxyType({})) -> None:
        """Print the one line on stdout that tells a supervisor that the process is ready, with its addresses.

        `more`: further addresses by kind. The address of kind `http` is printed as `http_address`.
        """
        line = {
            "ready": True,
            "role": self._role,
            "id": self._instance,
            "address": self.address,
            "metrics_address": metrics_address,
            **{f"{kind}_address": address for kind, address in more.items()},
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    def stop(self) -> None:
        """Ask `run` to drain and return. A second call ends the drain. Safe in a signal handler."""
        (self._cut_short if self._stopping.is_set() else self._stopping).set()

    async def run(self, drain: Callable[[], Awaitable[None]], drain_s: float = DRAIN_S) -> None:
        """Serve until SIGTERM, SIGINT or `stop`. Then drain for at most `drain_s`, and stop the server (graceful shutdown).

        `drain` is called once, when health is already NOT_SERVING. It refuses new requests, and returns when all running
        requests have ended. It is cancelled after `drain_s`.

        If the gRPC server ends by itself, its error is raised, or RuntimeError. The process must then end, so that a
        supervisor starts another one.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        stopping = asyncio.ensure_future(self._stopping.wait())
        ended = asyncio.ensure_future(self._terminated())
        trimming = asyncio.create_task(keep_trimmed(self._idle_bytes), name="heap")
        try:
            await asyncio.wait((stopping, ended), return_when=asyncio.FIRST_COMPLETED)
            if not stopping.done():
                await ended  # raises the error of the server, if there is one
                raise RuntimeError(f"The gRPC server at {self.address} ended by itself.")
            await self.set_serving(False)
            log.info("draining", extra={"drain_s": drain_s})
            await self._drain(drain, drain_s)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            stopping.cancel()
            await end([trimming])
            grace_s = 0.0 if self._cut_short.is_set() else STOP_GRACE_S
            await asyncio.gather(*(each.stop(grace_s) for each in {self.grpc, *self._closing}))
            await asyncio.gather(*self._closing.values())
            await end([ended])
            log.info("stopped")

    async def _terminated(self) -> None:
        """Return when the gRPC server with the listener ended by itself. Raises its error, if there is one."""
        ends: set[asyncio.Future[Any]] = set()
        while True:
            self._reopened.clear()
            ended = asyncio.ensure_future(self.grpc.wait_for_termination())
            ends.add(ended)
            reopened = asyncio.ensure_future(self._reopened.wait())
            try:
                await asyncio.wait((ended, reopened), return_when=asyncio.FIRST_COMPLETED)
                if not self._reopened.is_set() and self.is_open:
                    await ended
                    return
                await reopened
            finally:
                reopened.cancel()

    async def _drain(self, drain: Callable[[], Awaitable[None]], drain_s: float) -> None:
        draining = asyncio.ensure_future(drain())
        cut_short = asyncio.ensure_future(self._cut_short.wait())
        try:
            await asyncio.wait((draining, cut_short), timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            cut_short.cancel()
            if not draining.done():
                log.warning("drain cut short", extra={"drain_s": drain_s})
                draining.cancel()
            (result,) = await asyncio.gather(draining, return_exceptions=True)
            if isinstance(result, Exception):
                log.error("drain failed", exc_info=result)
