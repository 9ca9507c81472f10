"""The shell around a service: a grpc.aio server that starts, says so, drains and stops; and the channel to one.

A service's main builds a `MeshServer`, registers its servicers on `.grpc`,
calls `listen`, connects what it needs, and then `run`. Decisions live elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
import uvloop
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from kvmesh.aio_server import aio_server
from kvmesh.attach import outbox as attach
from kvmesh.health import HEALTH_SERVICE, HealthServicer
from kvmesh.heap import keep_trimmed
from kvmesh.interceptors import ErrorInterceptor
from kvmesh.metrics import resident_bytes
from kvmesh.request_reader import RequestReader, RequestReaderInterceptor
from kvmesh.tasks import end

log = logging.getLogger(__name__)

DRAIN_S: Final = 30.0
"""Longest wait for live requests at a drain; what is left is cancelled."""

STOP_GRACE_S: Final = 1.0
"""Time for streams to end after a drain, before their calls are cut."""


# A frozen peer (SIGSTOP, a lost host) is noticed by pings alone. keepalive_timeout_ms is not enough: without
# ping_timeout_ms a frozen peer was not noticed for 30 s.
def _keepalive(every_s: float) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.keepalive_time_ms", round(every_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(every_s * 2000)),
        ("grpc.http2.ping_timeout_ms", round(every_s * 2000)),
        ("grpc.http2.max_pings_without_data", 0),
    )


METADATA_BYTES_MAX: Final = 8_192
"""The limit of a call, once the client has acknowledged it. Until then gRPC allows 16 MB, and no option changes that."""

HANDSHAKE_S: Final = 10.0
"""Time for a new connection to speak TLS."""

SETTINGS_S: Final = 10.0
"""Time for a client to acknowledge the limits of its connection, after TLS if it speaks that. gRPC's own default is at
least a minute."""

SERVER_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # a second process on the same port must fail, not share it
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 200),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1000)),
    ("grpc.http2.settings_timeout", round(SETTINGS_S * 1000)),
    # Measures the line, and lets a caller send megabytes ahead of what is read. Without it 64 KB go ahead per stream, and
    # as much as a message says it has once it is read.
    ("grpc.http2.bdp_probe", 0),
    # Refuses streams while earlier ones of the connection are being freed, though fewer than allowed are open: stock
    # clients see that as UNAVAILABLE.
    ("grpc.http.overload_protection", 0),
)
"""Of every server: the mesh's channels ping each second, and gRPC's own default takes that for an attack."""

CHANNEL_OPTIONS: Final = (
    *_keepalive(1.0),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Despite its name this is the deadline of one attempt to connect; too short a one fails on a busy machine.
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),  # the frontend alone retries
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)
"""Options of every channel between processes of the mesh."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What gRPC itself holds for callers before any code of ours sees them."""

    message_bytes_max: int = attach.MESSAGE_BYTES_MAX
    """Larger messages are refused by gRPC as soon as their length is known. Services refuse smaller ones, with a better
    sentence than gRPC's."""
    connections_max: int = 4_096
    """Further connections are closed as they come; an idle one takes some 15 KB."""
    streams_max: int = 1_000
    """Open calls per connection; a client holds back what is beyond."""

    pending_max: int = 4_096
    """Calls that gRPC holds until the event loop takes them, some 15 KB each. Beyond it more and more new ones are ended
    CANCELLED by gRPC, without a word of ours; a sixteenth more, and all of them are."""

    def options(self) -> tuple[tuple[str, int], ...]:
        """Return them as gRPC takes them."""
        return (
            ("grpc.server.max_pending_requests", self.pending_max),
            ("grpc.server.max_pending_requests_hard_limit", self.pending_max + self.pending_max // 16),
            ("grpc.max_receive_message_length", self.message_bytes_max),
            ("grpc.max_allowed_incoming_connections", self.connections_max),
            ("grpc.max_concurrent_streams", self.streams_max),
        )


class ListenError(OSError):
    """The address cannot be listened on; the text is one sentence for the operator."""


def channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, name: str = ""
) -> grpc.aio.Channel:
    """Return a channel to `host:port`, plain without `credentials`. The caller closes it.

    `name`: who must be there by its certificate, whatever the address is called.
    """
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", name)) if name else CHANNEL_OPTIONS
    return grpc.aio.secure_channel(address, credentials, options=options)


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run `main` on uvloop and return its exit status."""
    return uvloop.run(main)


class MeshServer:
    """One process's gRPC server with health, reflection and error mapping.

    BOUND after `listen`, SERVING after `set_serving(True)`, DRAINING from the
    first SIGTERM or SIGINT (health NOT_SERVING, `drain` runs), then stopped. A
    second signal cuts the drain short.
    """

    def __init__(
        self,
        role: str,
        instance: str,
        service_names: Sequence[str],
        *,
        keepalive_s: float = 1.0,
        interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
        credentials: grpc.ServerCredentials | None = None,
        guards: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
        limits: ServerLimits = ServerLimits(),  # frozen
        request_reader: RequestReader | None = None,
    ) -> None:
        """Build the server; no I/O yet. `service_names` are the full names, for health and reflection.

        `credentials`: TLS; None is plain. `guards` see a call before its message and may refuse it with a MeshError.
        `request_reader` waits for the messages of calls; one that a servicer uses itself may be the same.

        A peer with live calls is pinged every `keepalive_s` and dropped when it does
        not answer for twice that: 1 s inside the mesh, more where clients are far away.
        """
        self._role = role
        self._instance = instance
        self._services = tuple(service_names)
        self._credentials = credentials
        self.grpc: grpc.aio.Server = aio_server(
            interceptors=(
                *(*interceptors, ErrorInterceptor(), *guards),
                RequestReaderInterceptor(request_reader or RequestReader(limits.message_bytes_max)),
            ),
            options=(*_keepalive(keepalive_s), *SERVER_OPTIONS, *limits.options()),
        )
        self._health = HealthServicer()
        self._health.register(self.grpc)
        reflection.enable_server_reflection(
            (*self._services, HEALTH_SERVICE, reflection.SERVICE_NAME), self.grpc
        )
        self.address = ""
        self._idle_bytes = 0
        """Resident memory before the first call."""
        self._is_serving = False
        self._standby_reason = ""
        self._stopping = asyncio.Event()
        self._cut_short = asyncio.Event()

    async def listen(self, address: str) -> str:
        """Bind `host:port` (port 0: a free one) and start; return the address. Health says NOT_SERVING.

        Raises ListenError if the address cannot be bound.
        """
        host = address.rpartition(":")[0]
        try:
            if self._credentials is None:
                port = self.grpc.add_insecure_port(address)
            else:
                port = self.grpc.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise ListenError(f"Cannot listen on {address}: the port is in use or not ours.") from error
        await self.set_serving(False)
        self._idle_bytes = resident_bytes()
        await self.grpc.start()
        self.address = f"{host}:{port}"
        return self.address

    async def set_serving(self, is_serving: bool) -> None:
        """Tell health checkers whether requests are welcome, for the process and each of its services."""
        self._is_serving = is_serving
        await self._update_health()

    async def stand_by(self, reason: str) -> None:
        """Say NOT_SERVING because of `reason`, whatever `set_serving` says; an empty one takes that back."""
        self._standby_reason = reason
        await self._update_health()

    async def _update_health(self) -> None:
        is_healthy = self._is_serving and not self._standby_reason and not self._stopping.is_set()
        state = (
            health_pb2.HealthCheckResponse.SERVING
            if is_healthy
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        self._health.reason = "it drains" if self._stopping.is_set() else self._standby_reason
        for service in ("", *self._services):
            await self._health.set(service, state)

    def announce(self, metrics_address: str) -> None:
        """Print the one line on stdout that tells a supervisor: ready, and where."""
        line = {
            "ready": True,
            "role": self._role,
            "id": self._instance,
            "address": self.address,
            "metrics_address": metrics_address,
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    def stop(self) -> None:
        """Ask `run` to drain and return; a second call cuts the drain short. Safe from a signal handler."""
        (self._cut_short if self._stopping.is_set() else self._stopping).set()

    async def run(self, drain: Callable[[], Awaitable[None]], drain_s: float = DRAIN_S) -> None:
        """Serve until SIGTERM, SIGINT or `stop`; then drain for at most `drain_s` and stop the server.

        `drain` is called once, when health already says NOT_SERVING: it refuses
        what is new and returns when what is live has ended. It is cancelled when
        its time is over. Raises what ended the gRPC server, or RuntimeError, if that ends by itself: without it the
        process is of no use, and a supervisor starts another.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        stopping = asyncio.ensure_future(self._stopping.wait())
        ended = asyncio.ensure_future(self.grpc.wait_for_termination())
        trimming = asyncio.create_task(keep_trimmed(self._idle_bytes), name="heap")
        try:
            await asyncio.wait((stopping, ended), return_when=asyncio.FIRST_COMPLETED)
            if not stopping.done():
                await ended  # raises what ended it, if that is known
                raise RuntimeError(f"The gRPC server at {self.address} ended by itself.")
            await self.set_serving(False)
            log.info("draining", extra={"drain_s": drain_s})
            await self._drain(drain, drain_s)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            stopping.cancel()
            await end([trimming])
            await self.grpc.stop(0.0 if self._cut_short.is_set() else STOP_GRACE_S)
            await asyncio.wait((ended,))
            log.info("stopped")

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
