"""Server end of Attach: one session, one reader and one writer per stream.

The server moves messages between a stream and a synchronous session. The session decides. All answers leave through the
outbox.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import grpc

from kvmesh.attach.frames import FrameError
from kvmesh.attach.outbox import MESSAGE_BYTES_MAX, DownwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.attach.v1 import attach_pb2_grpc
from kvmesh.attach.writer import OutboxStuck, Writer
from kvmesh.call import Call, GrpcCall
from kvmesh.clock import Clock
from kvmesh.errors import MeshError
from kvmesh.request_reader import RequestReader

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1

LAST_WRITE_S = 0.5


class Session(Protocol):
    """The state of one attached caller at a service. Synchronous. It answers through the outbox it was opened with."""

    def on_request(self, message: pb.AttachRequest, now_s: float) -> None:
        """Take one message. Raises FrameError if it breaks the protocol. Then the stream ends, and `on_closed` follows."""
        ...

    def on_closed(self, now_s: float) -> None:
        """Clean up after the stream. Called exactly once. Rows that are added to the outbox afterwards are not sent."""
        ...


class Attachable(Protocol):
    """A service that accepts attached callers."""

    def open_session(self, peer: pb.Hello, outbox: DownwardOutbox, now_s: float) -> Session:
        """Return the session for a caller that has said hello."""
        ...

    def after_event(self) -> None:
        """Called after each event of the service, for example to update its timer."""
        ...


class AttachService(attach_pb2_grpc.AttachServiceServicer):
    """Serves Attach over grpc.aio for one `Attachable`."""

    def __init__(
        self, service: Attachable, hello: pb.Hello, clock: Clock, request_reader: RequestReader | None = None
    ) -> None:
        """`request_reader` waits for hellos."""
        self._request_reader = request_reader or RequestReader(MESSAGE_BYTES_MAX)
        self._service = service
        self._hello = hello
        self._clock = clock
        self.stream_count = 0

    async def Attach(self, request_iterator: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:  # type: ignore[override]  # named by the protocol; writes instead of yielding
        """See attach.proto."""
        problem = await self.serve(GrpcCall(context))
        if problem is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)

    async def serve(self, call: Call[pb.AttachRequest, pb.AttachResponse]) -> str | None:
        """Serve one stream until it ends. Return the peer's protocol error, or None.

        Raises MeshError if the first message cannot be read (CALLS_FULL) or parsed (MESSAGE_MALFORMED).
        """
        try:
            first = await self._request_reader.message(call.read, (call.peer,))
        except MeshError as refusal:
            if refusal.reason == "REQUEST_TIMEOUT":
                return f"no hello arrived within {self._request_reader.timeout_s:g} s"
            raise
        if first is None:
            return None
        if not first.HasField("hello") or first.hello.protocol_version != PROTOCOL_VERSION:
            return f"hello.protocol_version must be {PROTOCOL_VERSION} in the first message"
        outbox = DownwardOutbox(self._hello)
        writer = Writer(call.write, outbox, self._clock)
        session = self._service.open_session(first.hello, outbox, self._clock.now_s())
        self.stream_count += 1
        peer = first.hello.process_id
        reading = asyncio.create_task(self._read(call, session, first), name=f"attach-read:{peer}")
        writing = asyncio.create_task(writer.run(), name=f"attach-write:{peer}")
        watching = asyncio.create_task(writer.watch(), name=f"attach-watch:{peer}")
        tasks = (reading, writing, watching)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            problem = _problem(peer, [error for task in done if (error := task.exception()) is not None])
            if problem is not None:
                writer.close()
                await asyncio.wait((writing,), timeout=LAST_WRITE_S)
            return problem
        finally:
            self.stream_count -= 1
            for task in tasks:
                task.cancel()
            session.on_closed(self._clock.now_s())
            self._service.after_event()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(
        self, call: Call[pb.AttachRequest, pb.AttachResponse], session: Session, first: pb.AttachRequest
    ) -> None:
        message: pb.AttachRequest | None = first
        while message is not None:
            session.on_request(message, self._clock.now_s())
            self._service.after_event()
            message = await call.read()


def _problem(peer: str, errors: Sequence[BaseException]) -> str | None:
    """Log why a stream ended. Return the peer's protocol error, or None."""
    problem = None
    for error in errors:
        if isinstance(error, MeshError):
            problem = error.message  # the message could not be parsed; the parser has logged it
        elif isinstance(error, FrameError):
            problem = str(error)
            log.warning("attach stream of %s broke the protocol: %s", peer, error)
        elif isinstance(error, OutboxStuck):
            log.warning("attach stream of %s dropped: %s", peer, error)
        elif not isinstance(error, (grpc.RpcError, grpc.aio.UsageError, grpc.aio.InternalError)):
            log.error("attach stream of %s failed", peer, exc_info=error)
    return problem
