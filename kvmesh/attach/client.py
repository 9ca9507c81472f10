"""Client end of Attach: one link per peer, opened on first use and opened again after it breaks.

A link moves messages between a stream and a synchronous sink, which decides. Reconnects use exponential backoff with
jitter. A link has a failure detector: the peer's load reports are the heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

import grpc

from kvmesh.attach.dialing import Dialer, DialRefused, PeerUnreachable
from kvmesh.attach.outbox import UpwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.attach.v1 import attach_pb2_grpc
from kvmesh.attach.writer import OutboxStuck, Writer
from kvmesh.clock import Clock
from kvmesh.failure_detector import CHECK_INTERVAL_S, FailureDetector

log = logging.getLogger(__name__)

BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 0.5
"""Bounds of the backoff before jitter: the time from the start of a failed attempt to the start of the next one.

After an attempt that lasted longer, the pause is BACKOFF_MIN_S / 2.
"""

REFUSED_PAUSE_S = 30.0
"""Pause before a host name that may not be dialled is looked up again."""

STABLE_S = 3.0
"""A peer becomes known after a stream that lasted this long. A shorter stream makes it a new peer again."""

ATTACH_TIMEOUT_S = 2.0
"""A peer that does not answer hello within this time is lost."""

HEARTBEAT_TIMEOUT_S = 3.0
"""A peer that reports its load each second is lost after this time without a message.

Its connection may still answer keepalive pings. gRPC answers them on a thread of its own, even while the process's
event loop stands still.
"""


STATUS_LOST = "INTERNAL: Internal error from Core"
"""Reason from grpc.aio where a write fails before the status of the call has come. It hides that status."""


class HeartbeatTimeout(Exception):
    """No message came for HEARTBEAT_TIMEOUT_S."""


class Sink(Protocol):
    """Receives the events of a link. Synchronous."""

    def on_attached(self, link: AttachLink, peer: pb.Hello, now_s: float) -> None:
        """Take the peer's hello. The stream is up."""
        ...

    def on_response(self, link: AttachLink, message: pb.AttachResponse, now_s: float) -> None:
        """Take one message. Raises FrameError if it breaks the protocol. Then the stream ends, and `on_lost` follows."""
        ...

    def on_lost(self, link: AttachLink, reason: str, now_s: float) -> None:
        """Take the loss of a stream, or of an attempt to open one. Every slot of it is void. The link has a new outbox."""
        ...


class AttachLink:
    """A stream to one address. `outbox` takes requests at any time. They are void when `on_lost` is called.

    `keep`: hold the stream open, and open it again when it breaks. Otherwise the stream opens on first use. The task of
    `run` owns the link, which ends when that task is cancelled.
    """

    def __init__(
        self,
        name: str,
        address: str,
        hello: pb.Hello,
        sink: Sink,
        clock: Clock,
        open_channel: Callable[[str], grpc.aio.Channel],
        *,
        keep: bool,
        expected_process: str = "",
        expected_boot: str = "",
        explain: Callable[[str], Awaitable[str]] | None = None,
        dialer: Dialer | None = None,
    ) -> None:
        """`dialer`: the dialer of the process. Without it the link may dial any address.

        `expected_process`, `expected_boot`: the process that must say hello. Empty: any. Addresses are reused, boot ids
        are not.

        `explain` diagnoses an address where no stream can be opened. It may return an empty text.
        """
        self.name = name
        self.address = address
        self.keep = keep
        self.is_up = False
        self.failures = 0
        """Attempts in a row that opened no stream."""
        self._is_untold = False
        """True if the first of them has not shown its reason."""
        self._hello = hello
        self._expected_process = expected_process
        self._expected_boot = expected_boot
        self._sink = sink
        self._clock = clock
        self._open_channel = open_channel
        self._explain = explain
        self._dialer = dialer or Dialer(clock)
        self._dialled = ""
        """The address that the last attempt dialled. Empty if it dialled no address."""
        self._is_known = False
        """True while the dials of this peer take from the budget of known peers."""
        self._dials = 0
        """Dials since the last stream that lasted STABLE_S."""
        self._attached_s = 0.0
        self._ready = asyncio.Event()
        self._detector: FailureDetector | None = None
        """Failure detector of the present stream. None until its peer has reported its load."""
        self.outbox = self._new_outbox()

    def __repr__(self) -> str:
        return f"AttachLink({self.name}, {self.address}, {'up' if self.is_up else 'down'})"

    async def run(self) -> None:
        """Open the stream when it is needed, serve it, and open it again, until cancelled."""
        while True:
            if not self.keep and not self.outbox.waiting_bytes:
                self._ready.clear()
                await self._ready.wait()
            reason, pause_s = "closed", 0.0
            began_s = self._clock.now_s()
            try:
                reason = await self._serve()
            except grpc.RpcError as error:
                code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
                reason = f"{code.name if code else 'broken'}: {getattr(error, 'details', lambda: '')()}"
            except DialRefused as error:
                reason, pause_s = f"refused: {error}", REFUSED_PAUSE_S
            except PeerUnreachable as error:
                reason = f"{grpc.StatusCode.UNAVAILABLE.name}: {error}"
            except (
                TimeoutError,
                OSError,
                grpc.aio.UsageError,
                OutboxStuck,
                HeartbeatTimeout,
                ValueError,
            ) as error:
                reason = f"{type(error).__name__}: {error}"
            except asyncio.CancelledError:
                self._on_stream_lost("closed by this side")
                raise
            except Exception as error:  # a bug in a sink loses the stream, not the process
                log.exception("attach link to %s failed", self.name)
                reason = f"{type(error).__name__}: {error}"
            self._on_stream_lost(reason)
            if self.failures == 1:
                self._is_untold = reason.startswith(STATUS_LOST)
            if self.failures == 1 + self._is_untold:  # logged once for each streak of failures
                await self._log_failure(reason)
            delay_s = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** min(self.failures, 8)) * random.uniform(
                0.5, 1.0
            )
            took_s = self._clock.now_s() - began_s
            await asyncio.sleep(
                max(BACKOFF_MIN_S / 2, delay_s - took_s, pause_s) if self.failures else delay_s
            )

    async def _log_failure(self, reason: str) -> None:
        """Log why the stream could not be opened."""
        why = ""
        is_unavailable = reason.startswith(grpc.StatusCode.UNAVAILABLE.name)
        queue = self._dialer.queue(is_known=self._is_known)
        if self._explain is not None and is_unavailable and self._dialled and queue.try_acquire():
            why = await self._explain(self._dialled)
        log.warning("cannot attach", extra={"peer": self.name, "address": self.address, "why": why or reason})

    def _new_outbox(self) -> UpwardOutbox:
        outbox = UpwardOutbox(self._hello)
        outbox.on_ready = self._ready.set
        return outbox

    def _on_stream_lost(self, reason: str) -> None:
        was_up, self.is_up = self.is_up, False
        self._detector = None
        if was_up:
            self._is_known = self._clock.now_s() >= self._attached_s + STABLE_S
            self._dials = 0 if self._is_known else self._dials
        self.failures = 0 if was_up else self.failures + 1
        self.outbox = self._new_outbox()
        try:
            self._sink.on_lost(self, reason, self._clock.now_s())
        except Exception:  # a bug in a sink must not end the link for good
            log.exception("bug in the sink of the attach link to %s: it did not take the loss", self.name)

    async def _serve(self) -> str:
        self._dialled = ""
        queue = self._dialer.queue(is_known=self._is_known)
        await queue.acquire(self._dials)
        self._dials += 1
        try:
            self._dialled = await self._dialer.resolve(self.address, self._dials - 1)
            await probe(self._dialled)
        except (DialRefused, PeerUnreachable):
            queue.refund()
            raise
        channel = self._open_channel(self._dialled)
        tasks: list[asyncio.Task[Any]] = []
        call = None
        try:
            call = attach_pb2_grpc.AttachServiceStub(channel).Attach()  # type: ignore[call-arg]  # stubs lack the writing form
            writer = Writer(call.write, self.outbox, self._clock)
            reading = asyncio.create_task(self._read(call), name=f"attach-read:{self.name}")
            writing = asyncio.create_task(writer.run(), name=f"attach-write:{self.name}")
            watching = asyncio.create_task(writer.watch(), name=f"attach-watch:{self.name}")
            listening = asyncio.create_task(self._watch_heartbeats(), name=f"attach-listen:{self.name}")
            tasks = [reading, writing, watching, listening]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for watch in (watching, listening):
                if watch in done:
                    await watch
            # The reader has the status of a broken stream. The writer knows only that it broke.
            if reading not in done:
                call.cancel()
                await asyncio.wait((reading,))
                if reading.cancelled():  # this side ended the call, so only the writer can know why
                    await writing
                    return "closed by this side"
            return await reading
        finally:
            if call is not None:
                call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await channel.close(None)

    async def _read(self, call: grpc.aio.StreamStreamCall[pb.AttachRequest, pb.AttachResponse]) -> str:
        async with asyncio.timeout(ATTACH_TIMEOUT_S):
            message = await call.read()
        if not message:  # EOF
            return await _status(call)
        if not isinstance(message, pb.AttachResponse) or not message.HasField("hello"):
            raise ValueError("the peer did not say hello in its first message")
        self._check_hello(message.hello)
        self.is_up, self._attached_s = True, self._clock.now_s()
        self._sink.on_attached(self, message.hello, self._clock.now_s())
        while isinstance(message, pb.AttachResponse):
            now_s = self._clock.now_s()
            if self._detector is not None:
                self._detector.heartbeat(now_s)
            elif message.HasField("load_report"):
                # A peer that reports its load does so each second. An older peer may never report it and stay silent.
                self._detector = FailureDetector(HEARTBEAT_TIMEOUT_S, now_s)
            self._sink.on_response(self, message, now_s)
            message = await call.read()
        return await _status(call)

    async def _watch_heartbeats(self) -> None:
        """Raise HeartbeatTimeout once the peer has sent nothing for too long."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            now_s = self._clock.now_s()
            if self._detector is not None and self._detector.check(now_s):
                raise HeartbeatTimeout(f"no message came for {self._detector.silent_s(now_s):.1f} s")

    def _check_hello(self, hello: pb.Hello) -> None:
        """Raise ValueError if another process than the expected one says hello."""
        for what, expected, said in (
            ("process", self._expected_process, hello.process_id),
            ("boot", self._expected_boot, hello.boot_id),
        ):
            if expected and said != expected:
                text = f"{self.address} is {what} {said!r}; {expected!r} is expected at this address"
                if not self.failures:
                    log.warning("attach link to %s: %s", self.name, text)
                raise ValueError(text)


async def probe(address: str) -> None:
    """Return once `address` accepts connections. Raises PeerUnreachable.

    gRPC cannot give up a connection that is being made. A channel that is closed before its connection is made leaves the
    socket behind. When the packets of a peer that was cut off pass again, each such socket becomes a connection that stays
    (seen with grpcio 1.85).
    """
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(ATTACH_TIMEOUT_S):
            # Resolved first: uvloop's open_connection leaves a cancelled lookup behind, which later logs an error.
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            writer = await _first([str(answer[4][0]) for answer in found], int(port))
    except TimeoutError as error:
        raise PeerUnreachable(f"no connection within {ATTACH_TIMEOUT_S:g} s") from error
    except OSError as error:
        raise PeerUnreachable(error.strerror or str(error)) from error
    writer.transport.abort()


async def _first(hosts: list[str], port: int) -> asyncio.StreamWriter:
    """Connect to the first of `hosts` that accepts. Raises the OSError of the last one."""
    for host in hosts[:-1]:
        with suppress(OSError):
            return (await asyncio.open_connection(host, port))[1]
    return (await asyncio.open_connection(hosts[-1], port))[1]


async def _status(call: grpc.aio.StreamStreamCall[pb.AttachRequest, pb.AttachResponse]) -> str:
    code, details = await call.code(), await call.details()
    return f"{code.name}: {details}"
