"""One stream of a connection, as both ends see it: messages in, messages out, flow control in both directions."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol

import grpc

from kvmesh.http2.codec import WINDOW, ErrorCode, Fields
from kvmesh.http2.messages import MessageReader, WireError, prefixed

PUSH_BYTES: Final = 16_384
"""Bytes that a stream with waiting output sends before the next such stream has its turn (round robin)."""


class Carrier(Protocol):
    """What a stream needs of its connection. See Connection."""

    @property
    def is_writable(self) -> bool:
        """True while the socket takes output."""
        ...

    def sendable(self, stream: int) -> int:
        """Return the bytes that `stream` may send now."""
        ...

    def try_send(self, stream: int, message: bytes) -> bool:
        """Send `message` with its prefix, if the windows have room for all of it."""
        ...

    def send(self, stream: int, data: bytes | memoryview) -> None:
        """Send `data`, which has at most `sendable` bytes."""
        ...

    def half_close(self, stream: int) -> None:
        """Send the end of this side of `stream`."""
        ...

    def send_last(self, stream: int, fields: Fields, *, is_reset_too: bool) -> None:
        """Send trailers."""
        ...

    def reset(self, stream: int, code: ErrorCode) -> None:
        """End `stream`."""
        ...

    def grant(self, stream: int, size: int) -> None:
        """Let the peer send `size` further bytes on `stream`."""
        ...

    def stall(self, stream: Stream) -> None:
        """Send the output of `stream` when its turn comes."""
        ...

    def forget(self, stream: Stream) -> None:
        """Remove a closed stream."""
        ...


class Stream:
    """Messages of one stream. One reader and one writer at a time.

    Inbound flow control: the peer may be WINDOW ahead of the reads. While a longer message is being read, it may send that
    message. Outbound: a write returns when the connection has taken its message, within the peer's windows.
    """

    __slots__ = (
        "_connection",
        "_drained",
        "_last_fields",
        "_pending",
        "_reading",
        "_window",
        "inbox",
        "is_closed",
        "is_reset",
        "number",
        "peer_ended",
    )

    def __init__(self, connection: Carrier, number: int, inbox: MessageReader) -> None:
        self._connection = connection
        self._pending: deque[bytes | memoryview] = deque()
        """Output that waits for the peer's window or for the socket."""
        self._last_fields: Fields | None = None
        """Trailers that follow the waiting output."""
        self._drained: asyncio.Future[None] | None = None
        self._reading: asyncio.Future[None] | None = None
        self._window = WINDOW
        """Bytes that the peer may still send."""
        self.number = number
        self.inbox = inbox
        self.peer_ended = False
        """True once the peer half-closed the stream."""
        self.is_closed = False
        """True once this side is done with the stream: its end was sent, or it was reset."""
        self.is_reset = False
        """True if it was closed by a reset, or with its connection."""

    # Input.

    def on_data(self, data: bytes, credit: int) -> None:
        """Take bytes of the peer. `credit`: bytes of the window that they took."""
        self._window -= credit
        self.inbox.feed(data)
        self._wake_reader()

    def on_peer_end(self) -> None:
        """Note that the peer sends nothing more."""
        self.peer_ended = True
        self._wake_reader()

    async def read(self) -> bytes | None:
        """Return the next message; None: the peer half-closed. Raises WireError or grpc.aio.UsageError."""
        while True:
            message = self.inbox.take()
            if message is not None:
                self._grant()
                return message
            if self.is_closed:
                raise grpc.aio.UsageError("the call is over")
            if self.peer_ended:
                if len(self.inbox):
                    raise WireError(grpc.StatusCode.INTERNAL, "the last message is cut off")
                return None
            self._grant()
            await self._input()

    async def arrives(self) -> bool:
        """Return True once a part of the next message is there; False: the peer half-closed. Raises grpc.aio.UsageError.

        It lets the peer send no more than the window, so that many streams can wait at the same time.
        """
        while not len(self.inbox):
            if self.is_closed:
                raise grpc.aio.UsageError("the call is over")
            if self.peer_ended:
                return False
            await self._input()
        return True

    async def _input(self) -> None:
        """Return after the next change of the input."""
        self._reading = asyncio.get_running_loop().create_future()
        try:
            await self._reading
        finally:
            self._reading = None

    def _grant(self) -> None:
        """Let the peer send on, once its window is half used or too small for the message that is read."""
        if self.peer_ended or self.is_closed:
            return
        missing = self.inbox.missing_bytes()
        wanted = max(WINDOW - len(self.inbox), missing)
        if self._window < missing or wanted - self._window > WINDOW // 2:
            self._connection.grant(self.number, wanted - self._window)
            self._window = wanted

    def _wake_reader(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)

    # Output.

    def try_write(self, message: bytes) -> bool:
        """Send `message` if no output waits and the peer's windows have room for all of it. Return False if not.

        Raises grpc.aio.UsageError if the call is over.
        """
        if self.is_closed or self._last_fields is not None:
            raise grpc.aio.UsageError("the call is over")
        return not self._pending and self._connection.try_send(self.number, message)

    async def write(self, message: bytes) -> None:
        """Send `message`, and return when the connection took all of it. Raises grpc.aio.UsageError: the call is over."""
        if self.try_write(message):
            return
        self._pending.append(memoryview(prefixed(message)))
        self._connection.stall(self)
        await self.drained()

    async def drained(self) -> None:
        """Return when no output waits. Raises grpc.aio.UsageError if the stream was reset before."""
        if self._pending or (self._last_fields is not None and not self.is_closed):
            if self._drained is None:
                self._drained = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._drained)
        if self.is_reset:
            raise grpc.aio.UsageError("the call is over")

    def finish(self, fields: Fields) -> None:
        """Send `fields` as trailers after the waiting output. A closed stream ignores them."""
        if self.is_closed or self._last_fields is not None:
            return
        self._last_fields = fields
        if self._pending or not self._connection.is_writable:
            self._connection.stall(self)
        else:
            self._send_last()

    def half_close(self) -> None:
        """Send the end of this side. No output may wait. Raises grpc.aio.UsageError if the call is over."""
        if self.is_closed:
            raise grpc.aio.UsageError("the call is over")
        self._connection.half_close(self.number)

    def push(self) -> bool:
        """Send waiting output as far as the windows allow, at most PUSH_BYTES. Return True if more can be sent now."""
        left = PUSH_BYTES
        while self._pending and left > 0:
            head = self._pending[0]
            size = min(len(head), left, self._connection.sendable(self.number))
            if size <= 0:
                return False
            self._connection.send(self.number, head[:size])
            left -= size
            if size == len(head):
                self._pending.popleft()
            else:
                self._pending[0] = head[size:]
        if self._pending:
            return self._connection.sendable(self.number) > 0
        if self._last_fields is not None:
            self._send_last()
        self._wake_writer()
        return False

    @property
    def is_finishing(self) -> bool:
        """True from `finish` on, also while the trailers wait behind output that the peer does not take."""
        return self._last_fields is not None

    @property
    def has_output(self) -> bool:
        """True while output waits."""
        return bool(self._pending) or (self._last_fields is not None and not self.is_closed)

    def _send_last(self) -> None:
        assert self._last_fields is not None
        self._connection.send_last(self.number, self._last_fields, is_reset_too=not self.peer_ended)
        self._close()

    # The end.

    def reset(self, code: ErrorCode = ErrorCode.CANCEL, *, keeps_input: bool = False) -> None:
        """End the stream at once. A closed stream ignores it. `keeps_input`: messages that came stay readable."""
        if not self.is_closed:
            self._connection.reset(self.number, code)
            self.is_reset = True
            self._close(keeps_input=keeps_input)

    def on_reset(self) -> None:
        """Take the end of the stream by a reset or by the loss of its connection."""
        self.is_reset = True
        self._close()

    def _close(self, *, keeps_input: bool = False) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._pending.clear()
        if not keeps_input:
            self.inbox.clear()
        self._wake_reader()
        self._wake_writer()
        self._connection.forget(self)

    def _wake_writer(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None
