"""The interceptor of every server that turns errors into statuses. Texts of other exceptions do not reach the client.

grpc.aio itself would send the text of an uncaught exception to the client.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any, Final

import grpc

from kvmesh.errors import MeshError, internal, to_status

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Wrap = Callable[[Any], Any]

STATUS_S: Final = 1.0
"""Longest wait until a peer takes a status. A status waits after messages that the peer does not read."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Wraps every handler of a server.

    - AbortError and CancelledError pass: handlers end on purpose with them.
    - A MeshError gets its status and details. In an ExceptionGroup the first MeshError counts.
    - Any other error is a bug. It is logged with its traceback. The client gets INTERNAL with a fixed sentence.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        return rewrapped(
            await continuation(handler_call_details),
            unary=lambda inner: _unary(inner, method),
            streaming=lambda inner: _streaming(inner, method),
        )


def rewrapped(handler: Any, *, unary: Wrap, streaming: Wrap) -> Any:
    """Return `handler` with its function wrapped by the kind of its answer (unary or streaming). None stays None."""
    if handler is None:
        return handler
    codecs = handler.request_deserializer, handler.response_serializer
    if handler.stream_stream:
        return grpc.stream_stream_rpc_method_handler(streaming(handler.stream_stream), *codecs)
    if handler.unary_stream:
        return grpc.unary_stream_rpc_method_handler(streaming(handler.unary_stream), *codecs)
    if handler.stream_unary:
        return grpc.stream_unary_rpc_method_handler(unary(handler.stream_unary), *codecs)
    return grpc.unary_unary_rpc_method_handler(unary(handler.unary_unary), *codecs)


def _unary(inner: Any, method: str) -> Any:
    async def call(request: Any, context: Context) -> Any:
        try:
            return await inner(request, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001  # bugs become INTERNAL here
            await _end(error, context, method)

    return call


def _streaming(inner: Any, method: str) -> Any:
    async def call(request: Any, context: Context) -> None:
        try:
            await answered(inner(request, context), context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001  # bugs become INTERNAL here
            await _end(error, context, method)

    return call


async def answered(answer: Any, context: Context) -> None:
    """Run a handler that answers with a stream. It may yield its answers or write them."""
    if inspect.isasyncgen(answer):
        async with aclosing(answer) as responses:
            async for response in responses:
                await context.write(response)
    else:
        await answer


async def _end(error: BaseException, context: Any, method: str) -> None:
    """End the call with the status of `error`. Never returns normally."""
    for one in _leaves(error):
        if isinstance(one, grpc.aio.AbortError):
            raise one
        if isinstance(one, MeshError):
            await _abort(one, context)
    log.error("bug in handler", exc_info=error, extra={"method": method})
    await _abort(internal(), context)


async def _abort(error: MeshError, context: Any) -> None:
    """Send the status, and end the handler even if the peer does not take it. Never returns normally.

    A status waits after messages that the peer has not read. gRPC keeps it until the peer reads or disconnects.
    """
    try:
        async with asyncio.timeout(STATUS_S):
            await context.abort_with_status(to_status(error))
    except grpc.aio.AbortError as abort:
        _forget_later(abort)
        raise
    except (TimeoutError, grpc.aio.InternalError) as why:  # the latter: not even the first message was sent
        log.debug("the peer did not take the status", extra={"reason": error.reason, "why": repr(why)})
        raise asyncio.CancelledError from None


def _forget_later(abort: grpc.aio.AbortError) -> None:
    """Release the frames in the traceback of `abort`, once its handler is over.

    gRPC keeps `abort` beside the call, and the frames keep the call: a cycle with 15 KB of gRPC's memory
    (docs/decisions/0022). Only the cycle collector would free it, which does not run while the process is idle.
    """

    def forget(_: object) -> None:
        abort.__traceback__ = abort.__context__ = None

    task = asyncio.current_task()
    assert task is not None, "a handler runs in a task"
    task.add_done_callback(forget)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
