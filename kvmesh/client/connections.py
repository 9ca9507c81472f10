"""The client's connections: a channel per frontend, its streams, and a failure detector. `Frontends` decides.

Keepalive pings of HTTP/2 detect a dead or frozen process or host. A frontend on grpcio answers pings even while its
event loop is blocked. A stream without messages proves nothing, because the model may be slow or the queue long. The
failure detector therefore probes a frontend without messages on any stream by a health check (liveness probe). Any
answer proves that the frontend is alive.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2

from kvmesh.client.frontends import Cause, Frontends
from kvmesh.client.retry_policy import RetryPolicy
from kvmesh.inference.v1 import inference_pb2 as pb

PING_S: Final = 1.0

CHANNEL_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", round(PING_S * 1000)),
    ("grpc.keepalive_timeout_ms", round(PING_S * 1500)),
    # keepalive_timeout_ms alone does not detect a frozen peer.
    ("grpc.http2.ping_timeout_ms", round(PING_S * 1500)),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 1000),  # despite its name, the deadline of one attempt to connect
    ("grpc.enable_retries", 0),  # CallState alone decides on retries
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)

_GENERATE: Final = "/kvmesh.inference.v1.InferenceService/Generate"
_HAND_OVER: Final = (("kvmesh-hand-over", "1"),)
"""Informs a draining frontend that this client can continue at another frontend of the region at once."""
_CHECK: Final = "/grpc.health.v1.Health/Check"
_STATUS_S: Final = 0.02
"""Longest wait for the status after a last message. The status carries the remaining quota."""


def dial(
    address: str, credentials: grpc.ChannelCredentials | None, options: Sequence[tuple[str, Any]]
) -> grpc.aio.Channel:
    """Return a channel to `address`, in plain text without `credentials`."""
    everything = (*CHANNEL_OPTIONS, *options)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=everything)
    return grpc.aio.secure_channel(address, credentials, options=everything)


@dataclass(frozen=True, slots=True)
class RemainingQuota:
    """Remaining quota of the caller, as reported with its last answer. None: not limited."""

    requests: int | None = None
    tokens: int | None = None
    concurrency: int | None = None


def remaining_of(trailers: Iterable[tuple[str, str | bytes]]) -> RemainingQuota | None:
    """Return the remaining quota in the trailers of a call; None if they contain none."""
    prefix = "kvmesh-remaining-"
    found = {key.removeprefix(prefix): value for key, value in trailers if key.startswith(prefix)}
    known = {
        name: int(found[name])
        for name in ("requests", "tokens", "concurrency")
        if _is_number(found.get(name))
    }
    return RemainingQuota(**known) if known else None


def _is_number(value: str | bytes | None) -> bool:
    return isinstance(value, str) and value.isascii() and value.removeprefix("-").isdecimal()


class Stream:
    """One call of Generate at one frontend."""

    __slots__ = ("address", "call", "is_cut")

    def __init__(self, address: str, call: Any) -> None:
        self.address = address
        self.call = call
        self.is_cut = False
        """True once the failure detector has cut the call, because its frontend does not answer."""


class _Peer:
    """One frontend: its channel, its streams, and the time of its last message."""

    def __init__(self, channel: grpc.aio.Channel, now_s: float) -> None:
        self.channel = channel
        self.last_answer_s = now_s
        self.streams: set[Stream] = set()
        self.is_probing = False
        self.generate: Any = channel.unary_stream(
            _GENERATE,
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        self.check: Any = channel.unary_unary(
            _CHECK,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )


class Connections:
    """See the module. `close` it before the loop ends."""

    def __init__(
        self,
        addresses: Mapping[str, Sequence[str]],
        retry_policy: RetryPolicy,
        open_channel: Callable[[str], grpc.aio.Channel],
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        """`addresses`: by region, the home region first. `metadata`: sent with every request, for example the API key."""
        self._metadata = tuple(metadata)
        self.frontends = Frontends(
            addresses,
            random.Random(),
            rest_min_s=retry_policy.rest_min_s,
            rest_max_s=retry_policy.rest_max_s,
        )
        self._retry_policy = retry_policy
        self._open_channel = open_channel
        self._peers: dict[str, _Peer] = {}
        self._failure_detector: asyncio.Task[None] | None = None
        self._probes: set[asyncio.Task[None]] = set()
        self._awaiting_status: set[Any] = set()
        """Calls that have received their last message and wait for their status."""
        self._status_reads: set[asyncio.Task[None]] = set()
        """Tasks that wait for these statuses."""
        self.remaining: RemainingQuota | None = None
        """Remaining quota of the caller, as reported with the last answer; None if none was reported."""
        self._has_streams = asyncio.Event()
        self._own_stall_s = float("-inf")
        """Time at which this process itself was last too slow to judge frontends."""
        self.is_closed = False

    @asynccontextmanager
    async def stream(
        self,
        avoid: str,
        request: pb.GenerateRequest,
        timeout_s: float,
        barred: Collection[str] = (),
        session: str = "",
    ) -> AsyncIterator[Stream]:
        """Send `request` to a frontend and yield the stream; the stream is cancelled at the end of the block.

        The frontend `avoid` is chosen only if there is no other. Frontends in the regions `barred` are left out.
        """
        if self.is_closed:
            raise RuntimeError("the client is closed")
        address = self._choose(avoid, barred, session)
        peer = self._peer(address)
        if not peer.streams:
            peer.last_answer_s = self._now_s()
        metadata = self._metadata + (_HAND_OVER if self.frontends.has_sibling(address) else ())
        stream = Stream(address, peer.generate(request, timeout=timeout_s, metadata=metadata))
        self.frontends.on_open(address)
        peer.streams.add(stream)
        self._has_streams.set()
        if self._failure_detector is None:
            self._failure_detector = asyncio.create_task(
                self._detect_failures(), name="kvmesh-client-failure-detector"
            )
        try:
            yield stream
        finally:
            peer.streams.discard(stream)
            self.frontends.on_close(address)
            if not stream.call.done() and stream.call not in self._awaiting_status:
                stream.call.cancel()

    def on_message(self, stream: Stream) -> None:
        """A message arrived on `stream`."""
        peer = self._peers[stream.address]
        peer.last_answer_s = self._now_s()
        self.frontends.on_answer(stream.address, peer.last_answer_s)

    def on_failure(self, stream: Stream, cause: Cause) -> None:
        """The frontend of `stream` is lost, or refuses requests now."""
        self.frontends.on_failure(stream.address, self._now_s(), cause)

    async def wait_for_status(self, stream: Stream) -> None:
        """Wait up to _STATUS_S for the status of `stream` after its last message; a task reads a later status."""
        if not stream.call.done():
            self._awaiting_status.add(stream.call)
            stream.call.add_done_callback(self._awaiting_status.discard)
        task = asyncio.create_task(self._read_trailers(stream.call), name="kvmesh-client-end")
        self._status_reads.add(task)
        task.add_done_callback(self._status_reads.discard)
        await asyncio.wait({task}, timeout=_STATUS_S)

    def take_trailers(self, trailers: Iterable[tuple[str, str | bytes]]) -> None:
        """Take the remaining quota from the trailers of a call."""
        self.remaining = remaining_of(trailers) or self.remaining

    async def _read_trailers(self, call: Any) -> None:
        with suppress(grpc.aio.AioRpcError):
            self.take_trailers(await call.trailing_metadata() or ())

    async def close(self) -> None:
        """End all streams and connections. Idempotent."""
        self.is_closed = True
        tasks = [
            *self._probes,
            *self._status_reads,
            *([self._failure_detector] if self._failure_detector is not None else []),
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for peer in self._peers.values():
            await peer.channel.close(None)

    def _choose(self, avoid: str, barred: Collection[str], session: str) -> str:
        now_s = self._now_s()
        for address in self.frontends.to_probe(now_s):
            self._start_probe(address)
        return self.frontends.choose(now_s, avoid, barred, session)

    def _peer(self, address: str) -> _Peer:
        if address not in self._peers:
            self._peers[address] = _Peer(self._open_channel(address), self._now_s())
        return self._peers[address]

    async def _detect_failures(self) -> None:
        """Probe every frontend that has streams and has sent nothing for `probe_after_s`."""
        retry_policy = self._retry_policy
        tick_s = retry_policy.probe_after_s / 4
        while True:
            if not any(peer.streams for peer in self._peers.values()):
                self._has_streams.clear()
                await self._has_streams.wait()
            before_s = self._now_s()
            await asyncio.sleep(tick_s)
            now_s = self._now_s()
            if now_s - before_s > tick_s + retry_policy.probe_timeout_s / 3:
                self._own_stall_s = now_s
            for address, peer in self._peers.items():
                if (
                    peer.streams
                    and not peer.is_probing
                    and now_s - peer.last_answer_s >= retry_policy.probe_after_s
                ):
                    self._start_probe(address)

    def _start_probe(self, address: str) -> None:
        task = asyncio.create_task(self._probe(address), name=f"kvmesh-client-probe:{address}")
        self._probes.add(task)
        task.add_done_callback(self._probes.discard)

    async def _probe(self, address: str) -> None:
        """Probe a frontend by a health check; any answer proves that the frontend is alive."""
        peer, asked_s = self._peer(address), self._now_s()
        peer.is_probing, is_serving = True, False
        try:
            answer = await peer.check(
                health_pb2.HealthCheckRequest(), timeout=self._retry_policy.probe_timeout_s
            )
            is_alive, is_serving = True, answer.status == health_pb2.HealthCheckResponse.SERVING
        except grpc.aio.AioRpcError as error:
            is_alive = error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
        finally:
            peer.is_probing = False
        if is_alive:
            peer.last_answer_s = self._now_s()
            self.frontends.on_probe(address, peer.last_answer_s, is_serving=is_serving)
        elif self._own_stall_s < asked_s and peer.last_answer_s < asked_s:
            self.frontends.on_failure(address, self._now_s())
            for stream in peer.streams:
                stream.is_cut = True
                stream.call.cancel()
        else:
            self.frontends.on_unknown(address)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
