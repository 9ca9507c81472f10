"""Reads the first message of each call, within bounds on time and memory, and parses it (docs/decisions/0022).

`UnreadCalls` decides which calls are read. Both protect the process against slowloris clients and floods of calls.

gRPC reads the message of a unary method before any Python code sees the call, at any size and for any time. So every
method is served as one that streams its input. Clients see no difference.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeVar

import grpc

from kvmesh.clock import Clock, MonotonicClock
from kvmesh.errors import MeshError, Violation, invalid
from kvmesh.fair_queue import Path
from kvmesh.interceptors import Context, answered
from kvmesh.metrics import Metrics
from kvmesh.stream_limit import StreamLimit
from kvmesh.unread_calls import UnreadCall, UnreadCalls, full

log = logging.getLogger(__name__)

Message = TypeVar("Message")

BODY_BYTES_MAX: Final = 64 << 20
"""Bytes of all messages that are read at once. At least READERS_MIN messages are allowed, even if they are larger."""

READERS_MIN: Final = 4
READERS_MAX: Final = 64
"""Most concurrent reads, even of small messages: the eviction looks at each of them."""

UNREAD_CALLS_MAX: Final = 2_000
TIMEOUT_S: Final = 5.0
"""Longest wait for other messages than client requests: hellos, health checks, status requests."""

STREAMS_MAX: Final = 1_000
"""Open calls of each method that answers one message with a stream, for example Health.Watch."""


class RequestReader:
    """Reads the first messages of calls. A service has one reader for client requests, and one for all other calls.

    `timeout_s`: longest wait for a message. `setting`: its configuration key, for the text of the refusal.
    """

    def __init__(
        self,
        message_bytes_max: int,
        *,
        calls_max: int = UNREAD_CALLS_MAX,
        timeout_s: float = TIMEOUT_S,
        setting: str = "",
        clock: Clock | None = None,
    ) -> None:
        readers = min(READERS_MAX, max(READERS_MIN, BODY_BYTES_MAX // message_bytes_max))
        self.unread = UnreadCalls(calls_max, readers)
        self.timeout_s = timeout_s
        self.late_total = 0
        self._setting = f" ({setting})" if setting else ""
        self._clock = clock or MonotonicClock()
        self._waiters: dict[UnreadCall, asyncio.Future[None]] = {}
        self._limits: dict[UnreadCall, asyncio.Timeout] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0

    async def message(self, read: Callable[[], Awaitable[Message]], caller: Path) -> Message:
        """Return the message of a call of `caller`, as `read` returns it.

        Raises MeshError (CALLS_FULL, REQUEST_TIMEOUT), or the error that `read` raises.
        """
        call = self.unread.open(caller, self._clock.now_s())
        limit = asyncio.timeout(self.timeout_s)
        self._limits[call] = limit
        try:
            async with limit:
                if call.reading_s is None:
                    await self._wait_for_reader(call)
                return await read()
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._late(call) from None
        finally:
            self._close(call)

    async def _wait_for_reader(self, call: UnreadCall) -> None:
        waiter = self._waiters[call] = asyncio.get_running_loop().create_future()
        self._arm_timer()
        await waiter

    def _close(self, call: UnreadCall) -> None:
        del self._limits[call]
        self._waiters.pop(call, None)
        successor = self.unread.close(call, self._clock.now_s())
        if successor is not None:
            waiter = self._waiters.pop(successor)
            if not waiter.done():
                waiter.set_result(None)
        self._arm_timer()

    def _arm_timer(self) -> None:
        """Set the timer to the next eviction."""
        due_s = self.unread.next_due_s()
        if due_s is None or (self._timer is not None and self._timer_s <= due_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = due_s
        delay_s = max(0.0, due_s - self._clock.now_s())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._evict_due)

    def _evict_due(self) -> None:
        self._timer = None
        try:
            for call in self.unread.evict_due(self._clock.now_s()):
                end_now(self._limits[call])
        finally:
            self._arm_timer()

    def _late(self, call: UnreadCall) -> MeshError:
        held, readers = len(self.unread), self.unread.readers_max
        if call.reading_s is None:
            what = (
                f"{held} calls wait, {readers} messages are read at once, and this call was not read in time"
            )
            return full(what, held, readers)
        if call.is_evicted:
            what = (
                f"{readers} messages are read at once, and this one did not arrive while other calls waited"
            )
            return full(what, held, readers)
        self.late_total += 1
        return MeshError(
            "REQUEST_TIMEOUT",
            f"the message did not arrive within {self.timeout_s:g} s{self._setting}",
            {"limit_s": f"{self.timeout_s:g}"},
        )


def export_request_reader(metrics: Metrics, request_reader: RequestReader) -> None:
    """Export the calls without their first message, and the calls that were refused while waiting for it."""
    unread = request_reader.unread
    metrics.gauge("unread_calls", "Calls without their message.", lambda: len(unread))
    metrics.total(
        "unread_calls_refused",
        "Calls refused because too many waited for their message.",
        lambda: unread.refused_total + unread.evicted_total,
    )
    metrics.total(
        "unread_calls_late",
        "Calls refused because their message did not arrive in time.",
        lambda: request_reader.late_total,
    )


class RequestReaderInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Serves every method as one that streams its input. The innermost interceptor: guards have checked the headers before.

    A handler of one message gets it from `request_reader`. A handler of many messages reads them from its context and
    bounds its first read itself. Its iterator waits for each message no longer than `request_reader` does. Bytes that
    cannot be parsed are INVALID_ARGUMENT.
    """

    def __init__(self, request_reader: RequestReader) -> None:
        self._request_reader = request_reader
        self._streams: dict[str, StreamLimit[asyncio.Timeout]] = {}
        """Open calls by method. Their timeouts serve to end them."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        codecs = _parser(handler.request_deserializer, method), handler.response_serializer
        if handler.unary_unary:
            return grpc.stream_unary_rpc_method_handler(self._unary(handler.unary_unary, method), *codecs)
        if handler.unary_stream:
            return grpc.stream_stream_rpc_method_handler(self._limited(handler.unary_stream, method), *codecs)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(self._paced(handler.stream_unary), *codecs)
        return grpc.stream_stream_rpc_method_handler(self._paced(handler.stream_stream), *codecs)

    def _unary(self, inner: Any, method: str) -> Any:
        async def call(_: Any, context: Context) -> Any:
            answer = inner(await self._only(context, method), context)
            return await answer if inspect.isawaitable(answer) else answer

        return call

    def _limited(self, inner: Any, method: str) -> Any:
        self._streams.setdefault(method, StreamLimit(method, STREAMS_MAX))

        async def call(_: Any, context: Context) -> None:
            request = await self._only(context, method)
            streams, connection = self._streams[method], context.peer()
            limit = asyncio.timeout(None)
            evicted = streams.open(connection, limit)
            try:
                if evicted is not None:
                    end_now(evicted)
                async with limit:
                    await answered(inner(request, context), context)
            except TimeoutError:
                if not limit.expired():
                    raise
                what = f"this call of {method} was evicted for a call of a connection with fewer calls"
                raise full(what, len(streams), streams.streams_max) from None
            finally:
                streams.close(connection, limit)

        return call

    def _paced(self, inner: Any) -> Any:
        def call(_: Any, context: Context) -> Any:
            return inner(self._messages(context), context)

        return call

    async def _messages(self, context: Context) -> AsyncIterator[Any]:
        while True:
            message = await self._request_reader.message(context.read, connection_of(context))
            if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
                return
            yield message

    async def _only(self, context: Context, method: str) -> Any:
        message = await self._request_reader.message(context.read, connection_of(context))
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
            raise no_message(method)
        return message


def end_now(limit: asyncio.Timeout) -> None:
    """End the call of `limit` at once. Does nothing if its time has just expired."""
    if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time())


def connection_of(context: Context) -> Path:
    """Return the caller of a call without an identity: its connection."""
    return (context.peer(),)


def no_message(method: str) -> MeshError:
    """Return the refusal of a call without a message."""
    return invalid("MESSAGE_MALFORMED", [Violation("(message)", "missing", f"one request of {method}")])


def _parser(parse: Callable[[bytes], Any] | None, method: str) -> Callable[[bytes], Any] | None:
    if parse is None:
        return None

    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except Exception:  # noqa: BLE001  # the codec may raise any error: the bytes come from a peer
            log.warning("message refused: it cannot be parsed", extra={"method": method, "bytes": len(data)})
            what = Violation(
                "(message)", f"{len(data)} bytes that cannot be parsed", f"a request of {method}"
            )
            raise invalid("MESSAGE_MALFORMED", [what]) from None

    return parsed
