"""What happens to a call before its request is known: its message is waited for, within bounds, and parsed.

A shell around `UnreadCalls`. gRPC reads the message of a unary method before any code of ours sees the call, as long and as
much as the client likes; so every method is served as one that streams its input, which clients cannot tell.
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
from kvmesh.interceptors import Context, answered
from kvmesh.metrics import Metrics
from kvmesh.unread import UnreadCall, UnreadCalls, full

log = logging.getLogger(__name__)

Message = TypeVar("Message")

BODY_BYTES_MAX: Final = 64 << 20
"""Bytes of messages that are being read, all together; four messages where one is larger than a quarter of it."""

READERS_MIN: Final = 4

UNREAD_CALLS_MAX: Final = 2_000
TIMEOUT_S: Final = 5.0
"""Of what is no request of a client's: hellos, health checks, questions for the status."""

WATCHES_MAX: Final = 1_000
"""Open calls of each method that answers one message with a stream, as Health.Watch does."""


class Reception:
    """Waits for the first messages of calls. One for the requests that a service takes, one for everything else.

    `timeout_s`: longest wait for a message. `setting`: the configuration key of that, for the text of the refusal.
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
        self.unread = UnreadCalls(calls_max, max(READERS_MIN, BODY_BYTES_MAX // message_bytes_max))
        self.timeout_s = timeout_s
        self.late_total = 0
        self._setting = f" ({setting})" if setting else ""
        self._clock = clock or MonotonicClock()
        self._turns: dict[UnreadCall, asyncio.Future[None]] = {}
        self._limits: dict[UnreadCall, asyncio.Timeout] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def message(self, read: Callable[[], Awaitable[Message]]) -> Message:
        """Return what `read` brings. Raises MeshError (CALLS_FULL, REQUEST_TIMEOUT), or what `read` raises."""
        call, displaced = self.unread.open(self._clock.now_s())
        limit = asyncio.timeout(self.timeout_s)
        self._limits[call] = limit
        try:
            if displaced is not None:
                self._end_now(displaced)
            async with limit:
                if call.reading_s is None:
                    await self._turn(call)
                return await read()
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._late(call) from None
        finally:
            self._close(call)

    async def _turn(self, call: UnreadCall) -> None:
        turn = self._turns[call] = asyncio.get_running_loop().create_future()
        self._watch()
        await turn

    def _close(self, call: UnreadCall) -> None:
        del self._limits[call]
        self._turns.pop(call, None)
        successor = self.unread.close(call, self._clock.now_s())
        if successor is not None:
            turn = self._turns.pop(successor)
            if not turn.done():
                turn.set_result(None)

    def _watch(self) -> None:
        """Come back when the call that is read longest has to give way."""
        at_s = self.unread.next_cut_s()
        if self._timer is None and at_s is not None:
            delay_s = max(0.0, at_s - self._clock.now_s())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._cut)

    def _cut(self) -> None:
        self._timer = None
        try:
            call = self.unread.cut(self._clock.now_s())
            if call is not None:
                self._end_now(call)
        finally:
            self._watch()

    def _end_now(self, call: UnreadCall) -> None:
        limit = self._limits[call]
        if not limit.expired():  # else its own time has just ended it
            limit.reschedule(asyncio.get_running_loop().time())

    def _late(self, call: UnreadCall) -> MeshError:
        if call.is_cut:
            held = len(self.unread)
            return full(
                "others wait while this call's message does not arrive, and only so many are read at once",
                held,
                self.unread.readers_max,
            )
        self.late_total += 1
        return MeshError(
            "REQUEST_TIMEOUT",
            f"the message did not arrive within {self.timeout_s:g} s{self._setting}",
            {"limit_s": f"{self.timeout_s:g}"},
        )


def watch_reception(metrics: Metrics, reception: Reception) -> None:
    """Export how many calls wait for their first message, and what became of those that did in vain."""
    unread = reception.unread
    metrics.gauge("unread_calls", "Calls whose message has not arrived.", lambda: len(unread))
    metrics.total(
        "unread_calls_refused",
        "Calls refused because too many waited for their message.",
        lambda: unread.refused_total + unread.cut_total,
    )
    metrics.total(
        "unread_calls_late", "Calls whose message did not arrive in time.", lambda: reception.late_total
    )


class ReceptionInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Serves every method as one that streams its input. Stands innermost: guards have seen the headers before.

    A handler of one message gets it from `reception`. One of many reads them from its context, and sees to its first
    itself; its iterator waits for each no longer than `reception` does. Bytes that cannot be parsed are INVALID_ARGUMENT.
    """

    def __init__(self, reception: Reception) -> None:
        self._reception = reception
        self._watches: dict[str, int] = {}
        """Open calls by method."""

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
            return grpc.stream_stream_rpc_method_handler(self._watch(handler.unary_stream, method), *codecs)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(self._paced(handler.stream_unary), *codecs)
        return grpc.stream_stream_rpc_method_handler(self._paced(handler.stream_stream), *codecs)

    def _unary(self, inner: Any, method: str) -> Any:
        async def call(_: Any, context: Context) -> Any:
            answer = inner(await self._only(context, method), context)
            return await answer if inspect.isawaitable(answer) else answer

        return call

    def _watch(self, inner: Any, method: str) -> Any:
        async def call(_: Any, context: Context) -> None:
            request = await self._only(context, method)
            held = self._watches.get(method, 0)
            if held >= WATCHES_MAX:
                raise full(f"{held} calls of {method} are open", held, WATCHES_MAX)
            self._watches[method] = held + 1
            try:
                await answered(inner(request, context), context)
            finally:
                self._watches[method] -= 1

        return call

    def _paced(self, inner: Any) -> Any:
        def call(_: Any, context: Context) -> Any:
            return inner(self._messages(context), context)

        return call

    async def _messages(self, context: Context) -> AsyncIterator[Any]:
        while True:
            message = await self._reception.message(context.read)
            if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
                return
            yield message

    async def _only(self, context: Context, method: str) -> Any:
        message = await self._reception.message(context.read)
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
            raise no_message(method)
        return message


def no_message(method: str) -> MeshError:
    """Return the refusal of a call that ended without a message."""
    return invalid("MESSAGE_MALFORMED", [Violation("(message)", "missing", f"one request of {method}")])


def _parser(parse: Callable[[bytes], Any] | None, method: str) -> Callable[[bytes], Any] | None:
    if parse is None:
        return None

    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except Exception:  # noqa: BLE001  # of whatever kind the codec's error is: the bytes are a peer's
            log.warning("message refused: it cannot be parsed", extra={"method": method, "bytes": len(data)})
            what = Violation(
                "(message)", f"{len(data)} bytes that cannot be parsed", f"a request of {method}"
            )
            raise invalid("MESSAGE_MALFORMED", [what]) from None

    return parsed
