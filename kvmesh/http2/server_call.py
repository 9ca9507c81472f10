"""One call at the server: the context of its handler, its deadline and its status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, NoReturn, Protocol, cast

import grpc

from kvmesh.http2.codec import Fields
from kvmesh.http2.fields import (
    ACCEPTED_ENCODINGS,
    CONTENT_TYPE,
    CallFields,
    Metadata,
    metadata_of,
    status_fields,
)
from kvmesh.http2.messages import WireError
from kvmesh.http2.stream import Stream
from kvmesh.interceptors import answered

log = logging.getLogger(__name__)

EOF: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it

RESPONSE: Final = ((b":status", b"200"), (b"content-type", CONTENT_TYPE), ACCEPTED_ENCODINGS)
"""First header block of each answer."""


class Client(Protocol):
    """What a call needs of its connection. See ServerConnection."""

    peer: str

    @property
    def names(self) -> Mapping[str, Sequence[bytes]]:
        """Names in the certificate of the client."""
        ...

    def send_headers(self, stream: int, fields: Fields) -> None:
        """Send a header block."""
        ...


class ServerCall:
    """The context of a handler. It has those methods of grpc.aio.ServicerContext that kvmesh uses, with the same meaning.

    INVARIANT: a call ends with exactly one status or one reset, and its task ends.
    """

    __slots__ = (
        "_connection",
        "_deadline",
        "_deadline_s",
        "_deserialize",
        "_is_answered",
        "_metadata",
        "_serialize",
        "_trailers",
        "fields",
        "stream",
        "task",
    )

    def __init__(self, connection: Client, stream: Stream, fields: Fields, read: CallFields) -> None:
        self._connection = connection
        self._metadata: tuple[tuple[str, str | bytes], ...] | None = None
        self._trailers: Metadata = ()
        self._is_answered = False
        self._serialize: Callable[[Any], bytes] | None = None
        self._deserialize: Callable[[bytes], Any] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._deadline_s: float | None = None
        self.fields = fields
        self.stream = stream
        self.task: asyncio.Task[None] | None = None
        if read.timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._deadline_s = loop.time() + read.timeout_s
            self._deadline = loop.call_at(self._deadline_s, self._on_deadline)

    # What handlers use.

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Return the metadata of the call. Raises grpc.aio.AbortError for a value that is no base64."""
        if self._metadata is None:
            try:
                self._metadata = metadata_of(self.fields)
            except WireError as error:
                raise self._refused(error) from None
        return self._metadata

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """Return the names in the peer's certificate; empty without TLS."""
        return self._connection.names

    def peer(self) -> str:
        """Return the name of the connection."""
        return self._connection.peer

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline, or None without one."""
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - asyncio.get_running_loop().time())

    async def read(self) -> Any:
        """Return the next message, or EOF. Raises grpc.aio.AbortError, or what the deserializer raises."""
        try:
            data = await self.stream.read()
        except WireError as error:
            raise self._refused(error) from None
        if data is None:
            return EOF
        return data if self._deserialize is None else self._deserialize(data)

    async def arrives(self) -> bool:
        """Return True once a part of the next message is there, or False at EOF. Raises grpc.aio.UsageError."""
        return await self.stream.arrives()

    def try_write(self, message: Any) -> bool:
        """Send `message` if it need not wait. Return False if it must be sent by `write`. Raises grpc.aio.UsageError."""
        self._answer()
        return self.stream.try_write(message if self._serialize is None else self._serialize(message))

    async def write(self, message: Any) -> None:
        """Send `message`, and return when the connection took it. Raises grpc.aio.UsageError: the call is over."""
        self._answer()
        await self.stream.write(message if self._serialize is None else self._serialize(message))

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        """Send `metadata` with the status."""
        self._trailers = tuple(metadata)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> NoReturn:
        """End the call with a status, once the waiting output is sent. Always raises."""
        self.finish(code, details, trailing_metadata or self._trailers)
        await self.stream.drained()
        raise grpc.aio.AbortError("Locally aborted.")

    async def abort_with_status(self, status: Any) -> NoReturn:
        """End the call with `status`, as `abort`."""
        await self.abort(status.code, status.details, status.trailing_metadata or ())

    # What the connection uses.

    async def run(self, handler: Any, method: bytes) -> None:
        """Serve the call by `handler`, a grpc.RpcMethodHandler. Never raises."""
        try:
            await self._serve(handler)
            self.finish(grpc.StatusCode.OK, "", self._trailers)
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            # A status that waits for a slow reader stays, as in grpcio: it goes once the peer reads.
            if not self.stream.is_finishing:
                self.stream.reset()
        except WireError as error:
            self.finish(error.code, str(error))
        except grpc.aio.UsageError:
            log.debug("the call ended before its handler", extra={"peer": self.peer()})
        except Exception:
            log.exception("bug in a handler", extra={"method": method.decode("ascii", "replace")})
            self.finish(grpc.StatusCode.INTERNAL, "the server failed")
        finally:
            self.close()
            if not self.stream.is_closed and not self.stream.has_output:
                self.stream.reset()

    def finish(self, code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> None:
        """Send the status. A second one is ignored."""
        fields = status_fields(code, details, metadata)
        if not self._is_answered:
            # Trailers alone: one header block is response and status.
            self._is_answered = True
            fields = [*RESPONSE, *fields]
        self.stream.finish(fields)

    def close(self) -> None:
        """Forget the deadline."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def cancel(self) -> None:
        """End the handler."""
        self.close()
        if self.task is not None:
            self.task.cancel()

    def end(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with a status from outside its handler, even if the peer does not read."""
        if self.stream.has_output:
            self.stream.reset()  # a status cannot follow a part of a message
        else:
            self.finish(code, details)
        self.cancel()

    async def _serve(self, handler: Any) -> None:
        self._deserialize, self._serialize = handler.request_deserializer, handler.response_serializer
        streams_in, streams_out = handler.request_streaming, handler.response_streaming
        function = (
            (handler.stream_stream if streams_out else handler.stream_unary)
            if streams_in
            else (handler.unary_stream if streams_out else handler.unary_unary)
        )
        request = self._messages() if streams_in else await self.read()
        if request is EOF:
            raise WireError(grpc.StatusCode.INTERNAL, "the call has no message")
        if streams_out:
            await answered(function(request, self), cast("Any", self))
        else:
            await self.write(await function(request, self))

    async def _messages(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not EOF:
            yield message

    def _refused(self, error: WireError) -> grpc.aio.AbortError:
        """End the call with the status of `error`. Return the error that ends its handler."""
        self.finish(error.code, str(error))
        return grpc.aio.AbortError(str(error))

    def _answer(self) -> None:
        if not self._is_answered and not self.stream.is_closed:
            self._is_answered = True
            self._connection.send_headers(self.stream.number, RESPONSE)

    def _on_deadline(self) -> None:
        self._deadline = None
        self.end(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
