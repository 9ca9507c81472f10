"""The server's end of Attach: one session per stream, one reader, one writer.

A shell: it moves messages between a stream and a synchronous session. The session decides; the outbox is the only way out.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

import grpc

from kvmesh.attach.frames import FrameError
from kvmesh.attach.outbox import STUCK_S, DownwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.attach.v1 import attach_pb2_grpc
from kvmesh.call import Call, GrpcCall
from kvmesh.clock import Clock

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1

LAST_WRITE_S = 0.5


class Session(Protocol):
    """What a service does for one attached caller. Synchronous; answers through the outbox it was opened with."""

    def on_request(self, message: pb.AttachRequest, now_s: float) -> None:
        """Take one message. Raises FrameError if it breaks the protocol: the stream ends, `on_closed` follows."""
        ...

    def on_closed(self, now_s: float) -> None:
        """Clean up: the stream is gone. Called exactly once; nothing added to the outbox afterwards is sent."""
        ...


class Attachable(Protocol):
    """A service that callers attach to."""

    def open_session(self, peer: pb.Hello, outbox: DownwardOutbox, now_s: float) -> Session:
        """Return the session for a caller that just said hello."""
        ...

    def after_event(self) -> None:
        """Called after each event that went into the service: the place to look at its timer."""
        ...


class AttachService(attach_pb2_grpc.AttachServiceServicer):
    """Serves Attach over grpc.aio for one `Attachable`."""

    def __init__(self, service: Attachable, hello: pb.Hello, clock: Clock) -> None:
        self._service = service
        self._hello = hello
        self._clock = clock
        self._streams: set[asyncio.Task[None]] = set()
        self.stream_count = 0

    async def Attach(self, request_iterator: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:  # type: ignore[override]  # named by the protocol; writes instead of yielding
        """See attach.proto."""
        problem = await self.serve(GrpcCall(context))
        if problem is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)

    async def serve(self, call: Call[pb.AttachRequest, pb.AttachResponse]) -> str | None:
        """Serve one stream until it ends. Return what the peer did wrong, or None."""
        first = await call.read()
        if first is None:
            return None
        if not first.HasField("hello") or first.hello.protocol_version != PROTOCOL_VERSION:
            return f"hello.protocol_version must be {PROTOCOL_VERSION} in the first message"
        outbox = DownwardOutbox(self._hello)
        ready = asyncio.Event()
        outbox.on_ready = ready.set
        ready.set()
        session = self._service.open_session(first.hello, outbox, self._clock.now_s())
        self.stream_count += 1
        reader = asyncio.create_task(
            self._read(call, session, first), name=f"attach-read:{first.hello.process_id}"
        )
        writer = asyncio.create_task(
            write_outbox(call, outbox, ready, self._clock), name=f"attach-write:{first.hello.process_id}"
        )
        try:
            done, _ = await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            problem = None
            for task in done:
                error = task.exception()
                if isinstance(error, FrameError):
                    problem = str(error)
                    log.warning("attach stream of %s broke the protocol: %s", first.hello.process_id, error)
                elif isinstance(error, OutboxStuck):
                    log.warning("attach stream of %s dropped: %s", first.hello.process_id, error)
                elif error is not None and not isinstance(error, (grpc.RpcError, grpc.aio.UsageError)):
                    log.error("attach stream of %s failed", first.hello.process_id, exc_info=error)
            return problem
        finally:
            self.stream_count -= 1
            for task in (reader, writer):
                task.cancel()
            session.on_closed(self._clock.now_s())
            self._service.after_event()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _read(
        self, call: Call[pb.AttachRequest, pb.AttachResponse], session: Session, first: pb.AttachRequest
    ) -> None:
        message: pb.AttachRequest | None = first
        while message is not None:
            session.on_request(message, self._clock.now_s())
            self._service.after_event()
            message = await call.read()


class OutboxStuck(Exception):
    """The peer reads no more: its outbox stayed full."""


async def write_outbox(call: Any, outbox: Any, ready: asyncio.Event, clock: Clock) -> None:
    """Write what `outbox` collects until cancelled: one message per write, everything that piled up meanwhile in the next.

    Raises OutboxStuck if the outbox stays full while a write is in flight.
    """
    while True:
        await ready.wait()
        ready.clear()
        message = outbox.take(clock.now_s())
        if message is None:
            continue
        write = asyncio.ensure_future(call.write(message))
        try:
            while not write.done():
                await asyncio.wait((write,), timeout=STUCK_S / 4)
                if not write.done() and outbox.is_stuck(clock.now_s()):
                    raise OutboxStuck(f"{outbox.waiting_bytes} bytes wait for a peer that does not read")
            await write
        except asyncio.CancelledError:
            # A status cannot be sent while a write is in flight, so an ending stream gives it a moment.
            await asyncio.wait((write,), timeout=LAST_WRITE_S)
            raise
        finally:
            if not write.done():
                write.cancel()
            elif not write.cancelled():
                write.exception()  # seen: the reader knows better why the stream ended
        if outbox.waiting_bytes:
            ready.set()
